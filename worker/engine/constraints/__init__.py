"""Constraints: grammars that say which tokens a sequence may have next."""
