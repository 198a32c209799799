"""The layers of Qwen3-Next and Qwen3.5: three of four have a gated delta net, whose state is recurrent; the fourth has
gated attention.

A delta net has key heads, each with the same number of value heads. Its projections are stored by key head in
Qwen3-Next, and separately in Qwen3.5:

    in_proj_qkvz    | q0 k0 v0 v1 z0 z1 | q1 k1 v2 v3 z2 z3 |      Qwen3-Next
    in_proj_qkv     | q0 q1 | k0 k1 | v0 v1 v2 v3 |                Qwen3.5, and llama.cpp for both
    in_proj_z       | z0 z1 z2 z3 |

In Qwen3.5 llama.cpp assigns value heads to key heads in turn (v0 v2 v1 v3), so everything that belongs to them is put
in that order. Norm weights are stored as differences from 1, except that of the delta net itself.
"""

import numpy as np

from tokenbus.worker.convert.config import SafetensorsConfig
from tokenbus.worker.convert.expected import ExpectedTensor, Order, TensorChange


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
