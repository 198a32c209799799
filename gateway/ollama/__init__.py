"""Ollama's API: chat, completions and embeddings in its form, and its calls about models."""
