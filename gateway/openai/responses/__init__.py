"""OpenAI's Responses API without any storage: every request has its whole conversation."""
