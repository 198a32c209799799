"""OpenAI's Responses API: a request contains its whole conversation, or continues a stored one."""
