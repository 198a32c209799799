"""Makes GGUF files of models that are published as safetensors, when they are loaded."""
