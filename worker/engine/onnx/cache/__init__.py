"""The KV cache of the ONNX engine: where each lane lies, and what is copied."""
