"""The engine process: its replicas, their step loops, and the messages to and from the frontend."""
