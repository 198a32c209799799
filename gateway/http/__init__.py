"""The API-independent HTTP side of the gateway: bodies, responses, errors, limits and the listening socket."""
