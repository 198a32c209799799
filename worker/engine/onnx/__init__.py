"""The ONNX engine: continuous batching over onnxruntime, for graphs with GroupQueryAttention or plain attention."""
