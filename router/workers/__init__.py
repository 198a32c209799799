"""One worker as a router knows it: its numbers, events and speed."""
