"""Lets plain NATS clients in by their API keys: answers the broker's auth callout, and
closes connections that a key no longer allows."""
