"""The tokenizer of a GGUF model: llama.cpp's own, and an exact copy of it for routers."""
