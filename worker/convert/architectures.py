"""The tensors of each architecture: their names in safetensors and in GGUF, and their required shapes.

Names in GGUF: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

import enum
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert.config import CONVERTER, SafetensorsConfig, check_delta_nets, refused
from tokenbus.worker.convert.safetensors import Tensor

Order = npt.NDArray[Any]
"""Row or column numbers, in their target order."""


class TensorChange(enum.Enum):
    """A change to a tensor's values."""

    NONE = "as they are"
    ADD_ONE = "of a norm whose weights are stored as differences from 1"
    NEGATIVE_EXP = "of rates that are stored as logarithms"


class ExpectedTensor(NamedTuple):
    """A tensor of a GGUF file, with `{e}` in place of an expert's number in the name of its source."""

    source: str
    name: str
    shape: tuple[int, ...]
    is_needed: bool = True
    source_shape: tuple[int, ...] | None = None
    """The shape of the source, without the experts' dimension; None if it is the same."""
    rows: Order | None = None
    """The rows taken from the source; None for all in order. A vector has rows of one number."""
    columns: Order | None = None
    change: TensorChange = TensorChange.NONE


def rotated_rows(num_rows: int, heads: int) -> Order:
    """Returns the order of each head's rows that puts rotation partners, which were half a head apart, side by side."""
    return np.arange(num_rows).reshape(heads, 2, num_rows // heads // 2).swapaxes(1, 2).reshape(-1)


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


_EXACT = ("ffn_gate_inp.weight", "ssm_conv1d.weight", "position_embd.weight", "token_types.weight")


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
        exact. So do the positions and types of encoders, of which llama.cpp wants it."""
        return len(self.shape) > 1 and not self.name.endswith(_EXACT)


def architecture_of(config: SafetensorsConfig, where: Path) -> Architecture:
    """Raises ModelError, naming llama.cpp's converter, for an architecture that is not converted here."""
    for name in config.architectures:
        if name in ARCHITECTURES:
            return _checked(ARCHITECTURES[name], config, where)
    shown = ", ".join(config.architectures) or "an unnamed architecture"
    known = ", ".join(ARCHITECTURES)
    raise ModelError(f"{where}: {shown} is not converted here, only {known}; use {CONVERTER} and name its file")


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
            f"{where}: {len(left)} tensors are unknown here, such as {some}; use {CONVERTER} and name its file"
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
    return norm(source, name, size) if architecture.has_delta_nets else ExpectedTensor(source, name, (size,))


def _attention(architecture: Architecture, config: SafetensorsConfig, layer: int) -> list[ExpectedTensor]:
    width, size, heads, kv_heads = config.hidden_size, config.head_size, config.num_attention_heads, config.kv_heads
    found = [_norm(architecture, "input_layernorm.weight", "attn_norm.weight", width)]
    if architecture.has_delta_nets and has_attention(config, layer):
        return found + attention(config)
    if architecture.has_delta_nets:
        return found + delta_net(config, is_fused=architecture.fuses_projections)
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


# The layers of Qwen3-Next and Qwen3.5: three of four have a gated delta net, whose state is recurrent; the fourth has
# gated attention.
#
# A delta net has key heads, each with the same number of value heads. Its projections are stored by key head in
# Qwen3-Next, and separately in Qwen3.5:
#
#     in_proj_qkvz    | q0 k0 v0 v1 z0 z1 | q1 k1 v2 v3 z2 z3 |      Qwen3-Next
#     in_proj_qkv     | q0 q1 | k0 k1 | v0 v1 v2 v3 |                Qwen3.5, and llama.cpp for both
#     in_proj_z       | z0 z1 z2 z3 |
#
# In Qwen3.5 llama.cpp assigns value heads to key heads in turn (v0 v2 v1 v3), so everything that belongs to them is put
# in that order. Norm weights are stored as differences from 1, except that of the delta net itself.


def has_attention(config: SafetensorsConfig, layer: int) -> bool:
    """Whether a layer has attention; if not, it has a delta net."""
    return (layer + 1) % config.full_attention_interval == 0


def attention(config: SafetensorsConfig) -> list[ExpectedTensor]:
    """Returns the tensors of an attention layer, whose queries include their gates."""
    width, size, heads, kv_heads = config.hidden_size, config.head_size, config.num_attention_heads, config.kv_heads
    rows = {"q": 2 * heads * size, "k": kv_heads * size, "v": kv_heads * size}
    return [
        *(ExpectedTensor(f"self_attn.{k}_proj.weight", f"attn_{k}.weight", (n, width)) for k, n in rows.items()),
        ExpectedTensor("self_attn.o_proj.weight", "attn_output.weight", (width, heads * size)),
        *(norm(f"self_attn.{one}_norm.weight", f"attn_{one}_norm.weight", size) for one in "qk"),
    ]


def norm(source: str, name: str, size: int) -> ExpectedTensor:
    """Returns a norm's weight."""
    return ExpectedTensor(source, name, (size,), change=TensorChange.ADD_ONE)


def delta_net(config: SafetensorsConfig, *, is_fused: bool) -> list[ExpectedTensor]:
    """Returns the tensors of a layer with a delta net. `is_fused`: its projections are stored by key head."""
    width, size, values = config.hidden_size, config.linear_value_head_dim, config.linear_num_value_heads
    keys_width = config.linear_num_key_heads * config.linear_key_head_dim
    values_width, kernel = values * size, config.linear_conv_kernel_dim
    mixed_width = 2 * keys_width + values_width
    by_turns = None if is_fused else _by_turns(config, 1)
    channels = (
        None if is_fused else np.concatenate((np.arange(2 * keys_width), 2 * keys_width + _by_turns(config, size)))
    )
    return [
        *(_fused_projections(config) if is_fused else _projections(config, channels)),
        ExpectedTensor(
            "linear_attn.conv1d.weight",
            "ssm_conv1d.weight",
            (mixed_width, kernel),
            source_shape=(mixed_width, 1, kernel),
            rows=channels,
        ),
        ExpectedTensor("linear_attn.dt_bias", "ssm_dt.bias", (values,), rows=by_turns),
        ExpectedTensor("linear_attn.A_log", "ssm_a", (values,), rows=by_turns, change=TensorChange.NEGATIVE_EXP),
        ExpectedTensor("linear_attn.norm.weight", "ssm_norm.weight", (size,)),
        ExpectedTensor(
            "linear_attn.out_proj.weight",
            "ssm_out.weight",
            (width, values_width),
            columns=None if is_fused else _by_turns(config, size),
        ),
    ]


def _fused_projections(config: SafetensorsConfig) -> list[ExpectedTensor]:
    width, heads, key_size = config.hidden_size, config.linear_num_key_heads, config.linear_key_head_dim
    values_width = config.linear_num_value_heads * config.linear_value_head_dim
    share = values_width // heads  # of a key head
    of_head = np.arange(heads * (2 * key_size + 2 * share)).reshape(heads, -1)
    queries, keys, values, gates = np.split(of_head, np.cumsum((key_size, key_size, share)), axis=1)
    mixed = np.concatenate([one.reshape(-1) for one in (queries, keys, values)])
    source, shape = "linear_attn.in_proj_qkvz.weight", (of_head.size, width)
    both = 2 * config.linear_num_value_heads
    return [
        ExpectedTensor(source, "attn_qkv.weight", (len(mixed), width), source_shape=shape, rows=mixed),
        ExpectedTensor(source, "attn_gate.weight", (values_width, width), source_shape=shape, rows=gates.reshape(-1)),
        ExpectedTensor("linear_attn.in_proj_ba.weight", "ssm_ba.weight", (both, width)),
    ]


def _projections(config: SafetensorsConfig, channels: Order | None) -> list[ExpectedTensor]:
    width, values, size = config.hidden_size, config.linear_num_value_heads, config.linear_value_head_dim
    mixed_width = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values * size
    by_turns = _by_turns(config, 1)
    return [
        ExpectedTensor("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", (mixed_width, width), rows=channels),
        ExpectedTensor(
            "linear_attn.in_proj_z.weight", "attn_gate.weight", (values * size, width), rows=_by_turns(config, size)
        ),
        ExpectedTensor("linear_attn.in_proj_b.weight", "ssm_beta.weight", (values, width), rows=by_turns),
        ExpectedTensor("linear_attn.in_proj_a.weight", "ssm_alpha.weight", (values, width), rows=by_turns),
    ]


def _by_turns(config: SafetensorsConfig, size: int) -> Order:
    """Returns the rows of all value heads, of `size` rows each: the first one of each key head, then the second ones,
    and so on."""
    heads = config.linear_num_key_heads
    count = config.linear_num_value_heads // heads
    return np.arange(heads * count * size).reshape(heads, count, size).swapaxes(0, 1).reshape(-1)
