"""Turns a request's text or conversation into token ids."""
