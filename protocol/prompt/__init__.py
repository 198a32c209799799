"""From a text or a conversation to token ids."""
