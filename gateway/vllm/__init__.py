"""Endpoints that vLLM has but OpenAI does not."""
