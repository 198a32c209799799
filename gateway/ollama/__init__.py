"""Ollama's read-only calls, with which editors discover a server's models before they use OpenAI's API."""
