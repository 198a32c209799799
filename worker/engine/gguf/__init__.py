"""The gguf runner: llama.cpp through llama-cpp-python's low-level API. Nothing else imports llama_cpp."""
