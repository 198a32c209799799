"""The tokenizer of a GGUF file, as the `tokenizers` library takes it."""
