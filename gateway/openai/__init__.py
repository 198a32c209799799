"""OpenAI's API: its requests become the wire's, chunks become its answers and errors."""
