"""The KV cache of the ONNX engine: which lane lies where, and what is copied."""
