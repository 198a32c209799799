"""Conversion of safetensors to GGUF."""
