"""Converts models published as safetensors to GGUF when they are loaded."""
