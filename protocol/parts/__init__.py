"""Messages that are larger than the broker allows, sent in parts."""
