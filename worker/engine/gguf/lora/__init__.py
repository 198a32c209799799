"""LoRA adapters of GGUF models: their files, checked against the base, and which of them a context has set."""
