"""ONNX graphs: reading one, changing it, loading it into onnxruntime, and running it."""
