"""The two kinds of KV cache that ONNX graphs have, and what is copied where."""
