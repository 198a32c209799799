"""LoRA adapters of ONNX models: the projections that they change, as inputs of the graph, and their files."""
