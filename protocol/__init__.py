"""What clients, routers and workers must agree on: messages, subjects, codec, errors, limits, hashing, prompts."""
