"""The gguf runner: llama.cpp through llama-cpp-python's low-level API. No other part of the product imports llama_cpp."""
