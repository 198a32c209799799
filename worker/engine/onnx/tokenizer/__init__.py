"""The tokenizer of an ONNX model's folder."""
