"""Reads the tokenizer of a GGUF file without loading its weights."""

from pathlib import Path

from llama_cpp import llama_cpp as llama

from tokenbus.protocol.prompt import tokenizer_bundle
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.gguf import backend
from tokenbus.worker.engine.gguf.tokenizer.gguf_tokenizer import GgufTokenizer
from tokenbus.worker.files import gguf_metadata


def read_rules(path: Path) -> tokenizer_bundle.PromptRules:
    """Returns the rules for a model's prompts. Raises ModelError."""
    found = gguf_metadata.read(path)
    backend.init()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    if model is None:
        raise ModelError(f"{path}: llama.cpp can't load its vocabulary: {backend.last_error()}")
    try:
        vocab = llama.llama_model_get_vocab(model)
        assert vocab is not None
        return GgufTokenizer(vocab, found).rules
    finally:
        llama.llama_model_free(model)
