"""The gguf runner: llama.cpp through llama-cpp-python's low-level API. Only it imports llama_cpp."""
