"""From a request's text or conversation to token ids."""
