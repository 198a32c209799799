"""OpenAI's Responses API without storage: every request contains its whole conversation."""
