"""Counts the recorded model outputs of the public suite `canitoolcall` that the parser reads correctly."""
