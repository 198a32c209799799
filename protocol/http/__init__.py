"""The HTTP server behind status pages and the gateway, bounded against whoever reaches its port."""
