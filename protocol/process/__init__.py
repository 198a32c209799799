"""Process-level code shared by all servers: signals, reloading settings, returning freed memory."""
