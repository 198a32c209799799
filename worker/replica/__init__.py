"""One worker on the bus: its frontend, endpoints and lifecycle."""
