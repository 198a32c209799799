"""The life of a process: how it is stopped, rereads its settings, and gives memory back."""
