"""Ollama's read-only calls, by which editors find the models of a server before they use OpenAI's API."""
