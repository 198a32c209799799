"""The HTTP server behind status pages and the gateway, with limits on what strangers can take of it."""
