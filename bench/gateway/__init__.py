"""Benchmarks of the gateway: what it adds to a NATS client, and how it compares with llama-server's HTTP API."""
