"""OpenAI's API: turns its requests into the wire's, and chunks into its answers and errors."""
