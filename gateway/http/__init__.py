"""The HTTP side of the gateway, whatever the API: bodies, responses, errors, limits and the listening socket."""
