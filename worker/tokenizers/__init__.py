"""Tokenizers as models' files describe them: of ONNX and safetensors folders here, of GGUF files in `gguf/`."""
