"""How a model's chat output is written, and the parser that reads it back."""
