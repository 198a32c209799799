"""OpenAI's completions for plain prompts."""
