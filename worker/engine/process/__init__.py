"""The engine process: its sockets, its replicas and their threads."""
