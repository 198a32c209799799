"""Endpoints that vLLM has and OpenAI has not."""
