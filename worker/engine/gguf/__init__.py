"""The GGUF engine: continuous batching over llama.cpp."""
