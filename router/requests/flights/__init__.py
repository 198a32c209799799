"""One request in flight: its record, its tokens so far, its log lines, and the messages that it causes."""
