"""Serves the endpoints of any API: a dialect declares them, and turns bodies into requests of the bus and back."""
