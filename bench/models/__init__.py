"""Models with random weights, made for measurements."""
