"""Writes the demo model as GGUF: weights (matrices F16, norms F32), vocabulary, merges and chat template."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models

from tools.demo_model import chats

Array = npt.NDArray[Any]


class DemoSizes(NamedTuple):
    """The sizes of a llama."""

    vocab: int
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    context: int
    rope_base: float
    norm_epsilon: float


def write(path: Path, sizes: DemoSizes, tokenizer: Tokenizer, tensors: dict[str, Array]) -> None:
    """Writes a model whose tensors have llama.cpp's names."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tokenbus demo")
    writer.add_context_length(sizes.context)
    writer.add_embedding_length(sizes.width)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.feed_forward)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_layer_norm_rms_eps(sizes.norm_epsilon)
    writer.add_rope_dimension_count(sizes.width // sizes.heads)
    writer.add_rope_freq_base(sizes.rope_base)
    writer.add_vocab_size(sizes.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _add_vocabulary(writer, tokenizer)
    for name, array in tensors.items():
        writer.add_tensor(name, array.astype(np.float16) if array.ndim > 1 else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    special = len(chats.SPECIAL_TOKENS)
    model = tokenizer.model
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(chats.PRE_TOKENIZER)
    writer.add_token_list([text for text, _ in vocabulary])
    writer.add_token_types([gguf.TokenType.CONTROL] * special + [gguf.TokenType.NORMAL] * (len(vocabulary) - special))
    writer.add_token_merges(_merges_of(model))
    writer.add_bos_token_id(chats.SPECIAL_TOKENS.index(chats.BOS))
    writer.add_eos_token_id(chats.SPECIAL_TOKENS.index(chats.END))
    writer.add_add_bos_token(True)
    writer.add_chat_template(chats.CHAT_TEMPLATE)


def _merges_of(model: models.BPE) -> list[str]:
    state = json.loads(model.__getstate__())
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]]
