"""The ONNX engine: continuous batching over onnxruntime, for graphs with GroupQueryAttention and for plain ones."""
