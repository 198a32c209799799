"""The HTTP server used by status pages and the gateway, with limits on what untrusted clients can consume."""
