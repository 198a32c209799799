"""ONNX models: finding one, what its graph is, changing and loading it."""
