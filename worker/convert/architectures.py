"""The tensors of each architecture: their names in safetensors and in GGUF, and their required shapes.

Names in GGUF: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py"""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import gated_delta
from tokenbus.worker.convert.config import CONVERTER, SafetensorsConfig, check_delta_nets, refused
from tokenbus.worker.convert.expected import ExpectedTensor, Order, TensorChange, rotated_rows
from tokenbus.worker.convert.safetensors import Tensor

_UNUSED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors in older files that follow from the configuration."""
_BESIDE = re.compile(r"mtp\..*|model\.visual\..*")
"""Tensors of Qwen3-Next and Qwen3.5 for multi-token prediction and images: serving text does not need them."""
_LANGUAGE_MODEL = "model.language_model."
_FIRST_STACK = "model.layers.0.mlp.experts.gate_up_proj"
_MAX_NAMED = 3


class Architecture(NamedTuple):
    """One of transformers' model classes."""

    name: str
    """llama.cpp's name for it."""
    rotates_neighbours: bool = False
    """Whether llama.cpp rotates adjacent pairs where transformers rotates the halves of a head."""
    norms_heads: bool = False
    """Whether queries and keys are normalized."""
    has_experts: bool = False
    has_delta_nets: bool = False
    """Whether three of four layers have a gated delta net instead of attention."""
    fuses_projections: bool = False
    """Whether the projections of these are in one tensor."""


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", rotates_neighbours=True),
    "MistralForCausalLM": Architecture("llama", rotates_neighbours=True),
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3", norms_heads=True),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", norms_heads=True, has_experts=True),
    "Qwen3NextForCausalLM": Architecture("qwen3next", has_experts=True, has_delta_nets=True, fuses_projections=True),
    "Qwen3_5ForCausalLM": Architecture("qwen35", has_delta_nets=True),
    "Qwen3_5ForConditionalGeneration": Architecture("qwen35", has_delta_nets=True),
    "Qwen3_5MoeForCausalLM": Architecture("qwen35moe", has_experts=True, has_delta_nets=True),
    "Qwen3_5MoeForConditionalGeneration": Architecture("qwen35moe", has_experts=True, has_delta_nets=True),
}


class PlannedTensor(NamedTuple):
    """A tensor of the GGUF file and its sources."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Tensor, ...]
    """The tensors that are concatenated in it."""
    rows: Order | None = None
    """The rows taken from each source; None for all in order."""
    columns: Order | None = None
    change: TensorChange = TensorChange.NONE

    @property
    def is_matrix(self) -> bool:
        """Whether it may be quantized. Expert gates make discrete choices, and convolutions are small, so they stay
        exact."""
        return len(self.shape) > 1 and not self.name.endswith(("ffn_gate_inp.weight", "ssm_conv1d.weight"))


def architecture_of(config: SafetensorsConfig, where: Path) -> Architecture:
    """Raises ModelError, naming llama.cpp's converter, for an architecture that is not converted here."""
    for name in config.architectures:
        if name in ARCHITECTURES:
            return _checked(ARCHITECTURES[name], config, where)
    shown = ", ".join(config.architectures) or "an unnamed architecture"
    known = ", ".join(ARCHITECTURES)
    raise ModelError(f"{where}: {shown} is not converted here, only {known}; use {CONVERTER} and pass --model its file")


def _checked(architecture: Architecture, config: SafetensorsConfig, where: Path) -> Architecture:
    if architecture.has_delta_nets:
        check_delta_nets(config, where)
    elif config.rotary_size != config.head_size:
        raise refused(where, "rotations of parts of heads")
    if not architecture.has_experts:
        return architecture
    norms = config.norm_topk_prob is not False if architecture.has_delta_nets else bool(config.norm_topk_prob)
    is_plain = norms and config.decoder_sparse_step == 1 and not config.mlp_only_layers
    if not is_plain or not 0 < config.num_experts_per_tok <= config.expert_count:
        raise ModelError(f"{where}: its experts are not used as llama.cpp does it; use {CONVERTER}")
    return architecture


def plan(
    architecture: Architecture, config: SafetensorsConfig, tensors: dict[str, Tensor], where: Path
) -> list[PlannedTensor]:
    """Returns the tensors to write, in the order of the layers. Raises ModelError if some are missing or unknown."""
    left = {name: tensor for name, tensor in tensors.items() if not _UNUSED.fullmatch(name)}
    if architecture.has_delta_nets:
        left = {_plain_name(name): tensor for name, tensor in left.items() if not _BESIDE.fullmatch(name)}
    if config.tie_word_embeddings:
        left.pop("lm_head.weight", None)
    planned: list[PlannedTensor] = []
    used: set[str] = set()
    for expected in _expected(architecture, config, has_stacks=_FIRST_STACK in left):
        names = _names_of(expected, config, left, where)
        if names:
            used.update(names)
            planned.append(_plan(expected, names, left, where))
    left = {name: tensor for name, tensor in left.items() if name not in used}
    if left:
        some = ", ".join(sorted(left)[:_MAX_NAMED])
        raise ModelError(
            f"{where}: {len(left)} tensors are unknown here, such as {some}; use {CONVERTER} and pass --model its file"
        )
    return planned


def _plain_name(name: str) -> str:
    """Returns the name of a tensor in a text-only model."""
    return f"model.{name.removeprefix(_LANGUAGE_MODEL)}" if name.startswith(_LANGUAGE_MODEL) else name


def _names_of(
    expected: ExpectedTensor, config: SafetensorsConfig, tensors: dict[str, Tensor], where: Path
) -> list[str]:
    """Returns the names of a tensor's sources; none if it is absent but optional."""
    count = config.expert_count if "{e}" in expected.source else 1
    names = [expected.source.replace("{e}", str(number)) for number in range(count)]
    missing = [name for name in names if name not in tensors]
    if missing and (expected.is_needed or len(missing) < count):
        raise ModelError(f"{where}: the tensor {missing[0]} is missing; fetch the whole repository")
    return [] if missing else names


def _plan(expected: ExpectedTensor, names: list[str], tensors: dict[str, Tensor], where: Path) -> PlannedTensor:
    """Raises ModelError if a source's shape differs from the configuration."""
    shape = expected.source_shape or (expected.shape[1:] if "{e}" in expected.source else expected.shape)
    for name in names:
        if tensors[name].shape != shape:
            shapes = f"{name} has the shape {list(tensors[name].shape)}, by its config.json it is {list(shape)}"
            raise ModelError(f"{where}: {shapes}: they are of two models; fetch both from one place")
    sources = tuple(tensors[name] for name in names)
    return PlannedTensor(expected.name, expected.shape, sources, expected.rows, expected.columns, expected.change)


def _expected(architecture: Architecture, config: SafetensorsConfig, *, has_stacks: bool) -> list[ExpectedTensor]:
    """Returns the tensors of a model, in the order of the layers. `has_stacks`: its experts are in one tensor."""
    width, vocab = config.hidden_size, config.vocab_size
    layers = [
        one._replace(source=f"model.layers.{number}.{one.source}", name=f"blk.{number}.{one.name}")
        for number in range(config.num_hidden_layers)
        for one in (
            *_attention(architecture, config, number),
            *_feed_forward(architecture, config, has_stacks=has_stacks),
        )
    ]
    return [
        ExpectedTensor("model.embed_tokens.weight", "token_embd.weight", (vocab, width)),
        *layers,
        _norm(architecture, "model.norm.weight", "output_norm.weight", width),
        ExpectedTensor(
            "lm_head.weight", "output.weight", (vocab, width), is_needed=config.tie_word_embeddings is False
        ),
    ]


def _norm(architecture: Architecture, source: str, name: str, size: int) -> ExpectedTensor:
    return (
        gated_delta.norm(source, name, size) if architecture.has_delta_nets else ExpectedTensor(source, name, (size,))
    )


def _attention(architecture: Architecture, config: SafetensorsConfig, layer: int) -> list[ExpectedTensor]:
    width, size, heads, kv_heads = config.hidden_size, config.head_size, config.num_attention_heads, config.kv_heads
    found = [_norm(architecture, "input_layernorm.weight", "attn_norm.weight", width)]
    if architecture.has_delta_nets and gated_delta.has_attention(config, layer):
        return found + gated_delta.attention(config)
    if architecture.has_delta_nets:
        return found + gated_delta.delta_net(config, is_fused=architecture.fuses_projections)
    for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        source, name, rows = f"self_attn.{letter}_proj", f"attn_{letter}", count * size
        order = rotated_rows(rows, count) if architecture.rotates_neighbours and letter != "v" else None
        found.append(ExpectedTensor(f"{source}.weight", f"{name}.weight", (rows, width), rows=order))
        found.append(ExpectedTensor(f"{source}.bias", f"{name}.bias", (rows,), is_needed=False, rows=order))
    found.append(ExpectedTensor("self_attn.o_proj.weight", "attn_output.weight", (width, heads * size)))
    if architecture.norms_heads:
        found += [ExpectedTensor(f"self_attn.{one}_norm.weight", f"attn_{one}_norm.weight", (size,)) for one in "qk"]
    return found


def _feed_forward(architecture: Architecture, config: SafetensorsConfig, *, has_stacks: bool) -> list[ExpectedTensor]:
    name = "post_attention_norm.weight" if architecture.has_delta_nets else "ffn_norm.weight"
    found = [_norm(architecture, "post_attention_layernorm.weight", name, config.hidden_size)]
    if not architecture.has_experts:
        return found + _perceptron("mlp", "", config.intermediate_size, config)
    found.append(ExpectedTensor("mlp.gate.weight", "ffn_gate_inp.weight", (config.expert_count, config.hidden_size)))
    if architecture.has_delta_nets:
        found += _perceptron("mlp.shared_expert", "_shexp", config.shared_expert_intermediate_size, config)
        gate, shape = "mlp.shared_expert_gate.weight", (1, config.hidden_size)
        found.append(ExpectedTensor(gate, "ffn_gate_inp_shexp.weight", shape[1:], source_shape=shape))
    return found + (_stacked_experts(config) if has_stacks else _single_experts(config))


def _perceptron(source: str, suffix: str, inner: int, config: SafetensorsConfig) -> list[ExpectedTensor]:
    width = config.hidden_size
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    return [
        ExpectedTensor(f"{source}.{kind}_proj.weight", f"ffn_{kind}{suffix}.weight", shape)
        for kind, shape in shapes.items()
    ]


def _single_experts(config: SafetensorsConfig) -> list[ExpectedTensor]:
    width, inner, experts = config.hidden_size, config.moe_intermediate_size, config.expert_count
    shapes = {"gate": (experts, inner, width), "up": (experts, inner, width), "down": (experts, width, inner)}
    return [
        ExpectedTensor(f"mlp.experts.{{e}}.{kind}_proj.weight", f"ffn_{kind}_exps.weight", shape)
        for kind, shape in shapes.items()
    ]


def _stacked_experts(config: SafetensorsConfig) -> list[ExpectedTensor]:
    """Returns the experts of a layer if they are in one tensor, each gate before its other projection."""
    width, inner, experts = config.hidden_size, config.moe_intermediate_size, config.expert_count
    both = np.arange(experts * 2 * inner).reshape(experts, 2, inner)
    shape = (experts, 2 * inner, width)
    return [
        *(
            ExpectedTensor(
                "mlp.experts.gate_up_proj",
                f"ffn_{kind}_exps.weight",
                (experts, inner, width),
                source_shape=shape,
                rows=both[:, place].reshape(-1),
            )
            for place, kind in enumerate(("gate", "up"))
        ),
        ExpectedTensor("mlp.experts.down_proj", "ffn_down_exps.weight", (experts, width, inner)),
    ]
