"""The tensors of each architecture: what they are called in safetensors and in GGUF, and of which shape they must be.

Names in GGUF: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py"""

import re
from pathlib import Path
from typing import NamedTuple

from tokenbus.worker.engine.runner import ModelError
from tokenbus.worker.models.convert.config import CONVERTER, ModelConfig
from tokenbus.worker.models.convert.safetensors import Tensor

_UNUSED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors of older files that follow from the configuration."""
_MAX_NAMED = 3


class Architecture(NamedTuple):
    """One of transformers' classes of models."""

    name: str
    """llama.cpp's name for it."""
    rotates_neighbours: bool = False
    """Whether llama.cpp rotates pairs of neighbours, where transformers rotates the halves of a head."""
    norms_heads: bool = False
    """Whether queries and keys are normed."""
    has_experts: bool = False


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", rotates_neighbours=True),
    "MistralForCausalLM": Architecture("llama", rotates_neighbours=True),
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3", norms_heads=True),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", norms_heads=True, has_experts=True),
}


class PlannedTensor(NamedTuple):
    """A tensor of the GGUF file and what it is made of."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Tensor, ...]
    """The tensors that lie in it one behind the other."""
    rotated_heads: int = 0
    """The heads whose rows are put in the order in which llama.cpp rotates them; 0 keeps their order."""

    @property
    def is_matrix(self) -> bool:
        """Whether it may be quantized. The gates of experts choose, so they stay exact."""
        return len(self.shape) > 1 and not self.name.endswith("ffn_gate_inp.weight")


class _Expected(NamedTuple):
    """A tensor that an architecture has, with `{e}` for the number of an expert."""

    source: str
    name: str
    shape: tuple[int, ...]
    heads: int = 0
    is_needed: bool = True


def architecture_of(config: ModelConfig, where: Path) -> Architecture:
    """Raises ModelError, naming llama.cpp's converter, for an architecture that is not converted here."""
    for name in config.architectures:
        if name in ARCHITECTURES:
            return _checked(ARCHITECTURES[name], config, where)
    shown = ", ".join(config.architectures) or "an unnamed architecture"
    known = ", ".join(ARCHITECTURES)
    raise ModelError(f"{where}: {shown} is not converted here, only {known}; use {CONVERTER} and pass --model its file")


def _checked(architecture: Architecture, config: ModelConfig, where: Path) -> Architecture:
    if not architecture.has_experts:
        return architecture
    is_plain = config.norm_topk_prob and config.decoder_sparse_step == 1 and not config.mlp_only_layers
    if not is_plain or not 0 < config.num_experts_per_tok <= config.expert_count:
        raise ModelError(f"{where}: its experts are not used as llama.cpp does it; use {CONVERTER}")
    return architecture


def plan(
    architecture: Architecture, config: ModelConfig, tensors: dict[str, Tensor], where: Path
) -> list[PlannedTensor]:
    """Returns the tensors to write, in the order of the layers. Raises ModelError if some are missing or unknown."""
    left = {name: tensor for name, tensor in tensors.items() if not _UNUSED.fullmatch(name)}
    if config.tie_word_embeddings:
        left.pop("lm_head.weight", None)
    planned = [
        found
        for expected in _expected(architecture, config)
        if (found := _take(expected, architecture, config, left, where)) is not None
    ]
    if left:
        names = ", ".join(sorted(left)[:_MAX_NAMED])
        raise ModelError(
            f"{where}: {len(left)} tensors are unknown here, such as {names}; use {CONVERTER} and pass --model its file"
        )
    return planned


def _take(
    expected: _Expected, architecture: Architecture, config: ModelConfig, left: dict[str, Tensor], where: Path
) -> PlannedTensor | None:
    """Takes the sources of a tensor out of those that are left."""
    count = config.expert_count if "{e}" in expected.source else 1
    names = [expected.source.replace("{e}", str(number)) for number in range(count)]
    missing = [name for name in names if name not in left]
    if missing and (expected.is_needed or len(missing) < count):
        raise ModelError(f"{where}: the tensor {missing[0]} is missing; fetch the whole repository")
    if missing:
        return None
    sources = tuple(left.pop(name) for name in names)
    one_shape = expected.shape[1:] if "{e}" in expected.source else expected.shape
    for name, source in zip(names, sources, strict=True):
        if source.shape != one_shape:
            shapes = f"{name} has the shape {list(source.shape)}, by its config.json it is {list(one_shape)}"
            raise ModelError(f"{where}: {shapes}: they are of two models; fetch both from one place")
    heads = expected.heads if architecture.rotates_neighbours else 0
    return PlannedTensor(expected.name, expected.shape, sources, heads)


def _expected(architecture: Architecture, config: ModelConfig) -> list[_Expected]:
    width, vocab = config.hidden_size, config.vocab_size
    layers = [
        _Expected(f"model.layers.{number}.{one.source}", f"blk.{number}.{one.name}", *one[2:])
        for number in range(config.num_hidden_layers)
        for one in (*_attention(architecture, config), *_feed_forward(architecture, config))
    ]
    return [
        _Expected("model.embed_tokens.weight", "token_embd.weight", (vocab, width)),
        *layers,
        _Expected("model.norm.weight", "output_norm.weight", (width,)),
        _Expected("lm_head.weight", "output.weight", (vocab, width), is_needed=config.tie_word_embeddings is False),
    ]


def _attention(architecture: Architecture, config: ModelConfig) -> list[_Expected]:
    width, size, heads, kv_heads = config.hidden_size, config.head_size, config.num_attention_heads, config.kv_heads
    found = [_Expected("input_layernorm.weight", "attn_norm.weight", (width,))]
    for letter, count, rotated in (("q", heads, heads), ("k", kv_heads, kv_heads), ("v", kv_heads, 0)):
        source, name, rows = f"self_attn.{letter}_proj", f"attn_{letter}", count * size
        found.append(_Expected(f"{source}.weight", f"{name}.weight", (rows, width), rotated))
        found.append(_Expected(f"{source}.bias", f"{name}.bias", (rows,), rotated, is_needed=False))
    found.append(_Expected("self_attn.o_proj.weight", "attn_output.weight", (width, heads * size)))
    if architecture.norms_heads:
        found += [_Expected(f"self_attn.{one}_norm.weight", f"attn_{one}_norm.weight", (size,)) for one in "qk"]
    return found


def _feed_forward(architecture: Architecture, config: ModelConfig) -> list[_Expected]:
    width, inner, experts = config.hidden_size, config.intermediate_size, config.expert_count
    found = [_Expected("post_attention_layernorm.weight", "ffn_norm.weight", (width,))]
    if not architecture.has_experts:
        shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        return found + [_Expected(f"mlp.{k}_proj.weight", f"ffn_{k}.weight", shape) for k, shape in shapes.items()]
    inner = config.moe_intermediate_size
    found.append(_Expected("mlp.gate.weight", "ffn_gate_inp.weight", (experts, width)))
    stacks = {"gate": (experts, inner, width), "up": (experts, inner, width), "down": (experts, width, inner)}
    return found + [
        _Expected(f"mlp.experts.{{e}}.{kind}_proj.weight", f"ffn_{kind}_exps.weight", shape)
        for kind, shape in stacks.items()
    ]
