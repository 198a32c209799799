"""The tokenizer in an ONNX model's folder."""
