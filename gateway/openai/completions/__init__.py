"""OpenAI's completions of plain prompts."""
