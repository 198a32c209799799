"""Tiny random models like Qwen3-Next and Qwen3.5 as they are published, and what they compute, with numpy."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support import safetensors_model
from tokenbus.demo import ONNX_PATH

Array = npt.NDArray[np.float64]
WIDTH, HEADS, KV_HEADS, HEAD_SIZE, ROTATED, VOCAB = 64, 4, 2, 32, 8, 640
KEY_HEADS, VALUE_HEADS, SIZE, KERNEL = 2, 6, 16, 4
LAYERS, EXPERTS, USED, INNER, SHARED = 5, 4, 2, 32, 48
EPSILON, ROPE_BASE = 1e-6, 10_000.0
_KEYS, _VALUES = KEY_HEADS * SIZE, VALUE_HEADS * SIZE
_SHARE = VALUE_HEADS // KEY_HEADS


class Kind(NamedTuple):
    """A class of models of transformers."""

    architecture: str
    is_fused: bool
    """Whether the projections of a delta net lie in one tensor."""
    has_experts: bool
    reads_images: bool = False


KINDS = {
    "qwen3next": Kind("Qwen3NextForCausalLM", is_fused=True, has_experts=True),
    "qwen35": Kind("Qwen3_5ForCausalLM", is_fused=False, has_experts=False),
    "qwen35-images": Kind("Qwen3_5ForConditionalGeneration", is_fused=False, has_experts=False, reads_images=True),
    "qwen35moe": Kind("Qwen3_5MoeForConditionalGeneration", is_fused=False, has_experts=True, reads_images=True),
}
Weights = dict[str, npt.NDArray[np.float32]]


def write(folder: Path, kind: Kind) -> Weights:
    """Writes a model with the demo's tokenizer; returns its weights, by the names of a model that reads text alone."""
    folder.mkdir(parents=True)
    for path in ONNX_PATH.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    config = _config(kind)
    (folder / "config.json").write_text(json.dumps(config))
    weights = _random(kind)
    published = {_published(name, kind): data for name, data in weights.items()}
    published |= {"mtp.fc.weight": np.zeros((2, 2), np.float32)}
    if kind.reads_images:
        published |= {"model.visual.patch_embed.proj.weight": np.zeros((2, 2), np.float32)}
    safetensors_model.write(folder / "model.safetensors", published)
    return weights


def _published(name: str, kind: Kind) -> str:
    return name.replace("model.", "model.language_model.", 1) if kind.reads_images else name


def _config(kind: Kind) -> dict[str, Any]:
    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE, "partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": KERNEL,
        "linear_key_head_dim": SIZE,
        "linear_value_head_dim": SIZE,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "layer_types": ["full_attention" if _attends(n) else "linear_attention" for n in range(LAYERS)],
        "tie_word_embeddings": False,
    }
    if kind.has_experts:
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": USED, "moe_intermediate_size": INNER}
        config |= {"shared_expert_intermediate_size": SHARED}
    if kind.reads_images:
        config["rope_parameters"]["mrope_section"] = [2, 1, 1]
        config = {"text_config": config, "tie_word_embeddings": False}
    return {"architectures": [kind.architecture], **config}


def _attends(layer: int) -> bool:
    return layer % 4 == 3


def _random(kind: Kind) -> Weights:
    rng = np.random.default_rng(3)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(kind, layer).items()}
    scale = {True: 0.3, False: 0.15}
    return {name: (rng.normal(size=shape) * scale[len(shape) == 1]).astype("<f4") for name, shape in shapes.items()}


def _layer(kind: Kind, layer: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    if _attends(layer):
        shapes |= {
            "self_attn.q_proj.weight": (2 * HEADS * HEAD_SIZE, WIDTH),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_SIZE),
            "self_attn.q_norm.weight": (HEAD_SIZE,),
            "self_attn.k_norm.weight": (HEAD_SIZE,),
        }
    else:
        shapes |= {
            "linear_attn.conv1d.weight": (2 * _KEYS + _VALUES, 1, KERNEL),
            "linear_attn.dt_bias": (VALUE_HEADS,),
            "linear_attn.A_log": (VALUE_HEADS,),
            "linear_attn.norm.weight": (SIZE,),
            "linear_attn.out_proj.weight": (WIDTH, _VALUES),
        }
        shapes |= (
            {
                "linear_attn.in_proj_qkvz.weight": (2 * _KEYS + 2 * _VALUES, WIDTH),
                "linear_attn.in_proj_ba.weight": (2 * VALUE_HEADS, WIDTH),
            }
            if kind.is_fused
            else {
                "linear_attn.in_proj_qkv.weight": (2 * _KEYS + _VALUES, WIDTH),
                "linear_attn.in_proj_z.weight": (_VALUES, WIDTH),
                "linear_attn.in_proj_b.weight": (VALUE_HEADS, WIDTH),
                "linear_attn.in_proj_a.weight": (VALUE_HEADS, WIDTH),
            }
        )
    if not kind.has_experts:
        return shapes | _perceptron("mlp", 96)
    shapes |= {"mlp.gate.weight": (EXPERTS, WIDTH), "mlp.shared_expert_gate.weight": (1, WIDTH)}
    shapes |= _perceptron("mlp.shared_expert", SHARED)
    if kind.is_fused:
        return shapes | {k: v for n in range(EXPERTS) for k, v in _perceptron(f"mlp.experts.{n}", INNER).items()}
    return shapes | {
        "mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, WIDTH),
        "mlp.experts.down_proj": (EXPERTS, WIDTH, INNER),
    }


def _perceptron(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (inner, WIDTH), "up": (inner, WIDTH), "down": (WIDTH, inner)}
    return {f"{prefix}.{name}_proj.weight": shape for name, shape in shapes.items()}


def logits(weights: Weights, kind: Kind, token_ids: list[int]) -> Array:
    """Returns the logits after each token."""
    exact = {name: data.astype(np.float64) for name, data in weights.items()}
    states = exact["model.embed_tokens.weight"][token_ids]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): data for name, data in exact.items() if name.startswith(prefix)}
        inputs = _norm(states, 1 + own["input_layernorm.weight"])
        states = states + (_attention(own, inputs) if _attends(layer) else _delta_net(own, inputs, kind))
        states = states + _feed_forward(own, _norm(states, 1 + own["post_attention_layernorm.weight"]), kind)
    return np.asarray(_norm(states, 1 + exact["model.norm.weight"]) @ exact["lm_head.weight"].T)


def _norm(states: Array, weight: Array) -> Array:
    return np.asarray(states / np.sqrt((states**2).mean(axis=-1, keepdims=True) + EPSILON) * weight)


def _sigmoid(values: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-values)))


def _silu(values: Array) -> Array:
    return values * _sigmoid(values)


def _softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _attention(own: dict[str, Array], inputs: Array) -> Array:
    count = len(inputs)
    both = (inputs @ own["self_attn.q_proj.weight"].T).reshape(count, HEADS, 2 * HEAD_SIZE)
    queries, gates = both[..., :HEAD_SIZE], both[..., HEAD_SIZE:]
    keys, values = (
        (inputs @ own[f"self_attn.{one}_proj.weight"].T).reshape(count, KV_HEADS, HEAD_SIZE) for one in "kv"
    )
    queries = _rotate(_norm(queries, 1 + own["self_attn.q_norm.weight"]))
    keys = _rotate(_norm(keys, 1 + own["self_attn.k_norm.weight"]))
    keys, values = (np.repeat(one, HEADS // KV_HEADS, axis=1) for one in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(HEAD_SIZE) + np.triu(
        np.full((count, count), -np.inf), 1
    )
    attended = np.einsum("hqk,khd->qhd", _softmax(scores), values) * _sigmoid(gates)
    return np.asarray(attended.reshape(count, -1) @ own["self_attn.o_proj.weight"].T)


def _rotate(heads: Array) -> Array:
    """Rotates the first numbers of each head: the first half of them with the second."""
    angles = np.arange(len(heads))[:, None] * ROPE_BASE ** (-np.arange(0, ROTATED, 2) / ROTATED)
    sine, cosine = np.sin(angles)[:, None], np.cos(angles)[:, None]
    one, other = heads[..., : ROTATED // 2], heads[..., ROTATED // 2 : ROTATED]
    rotated = (one * cosine - other * sine, other * cosine + one * sine, heads[..., ROTATED:])
    return np.concatenate(rotated, axis=-1)


def _delta_net(own: dict[str, Array], inputs: Array, kind: Kind) -> Array:
    count = len(inputs)
    mixed, gates, beta, alpha = _projections(own, inputs, kind)
    kernel = own["linear_attn.conv1d.weight"][:, 0]
    padded = np.concatenate((np.zeros((KERNEL - 1, mixed.shape[1])), mixed))
    mixed = _silu(sum(padded[place : place + count] * kernel[:, place] for place in range(KERNEL)))  # type: ignore[arg-type]
    queries, keys = (
        np.repeat(_unit(one.reshape(count, KEY_HEADS, SIZE)), _SHARE, axis=1)
        for one in (mixed[:, :_KEYS], mixed[:, _KEYS : 2 * _KEYS])
    )
    values = mixed[:, 2 * _KEYS :].reshape(count, VALUE_HEADS, SIZE)
    decay = np.exp(-np.exp(own["linear_attn.A_log"]) * np.log1p(np.exp(alpha + own["linear_attn.dt_bias"])))
    state, outputs = np.zeros((VALUE_HEADS, SIZE, SIZE)), []
    for place in range(count):
        state = state * decay[place][:, None, None]
        known = np.einsum("hkv,hk->hv", state, keys[place])
        change = (values[place] - known) * _sigmoid(beta[place])[:, None]
        state = state + keys[place][:, :, None] * change[:, None]
        outputs.append(np.einsum("hkv,hk->hv", state, queries[place]) / np.sqrt(SIZE))
    found = _norm(np.stack(outputs), own["linear_attn.norm.weight"]) * _silu(gates)
    return np.asarray(found.reshape(count, -1) @ own["linear_attn.out_proj.weight"].T)


def _projections(own: dict[str, Array], inputs: Array, kind: Kind) -> tuple[Array, Array, Array, Array]:
    """Returns queries, keys and values side by side, and for each value head its gate, beta and alpha."""
    count = len(inputs)

    def project(name: str) -> Array:
        return np.asarray(inputs @ own[f"linear_attn.in_proj_{name}.weight"].T)

    if not kind.is_fused:
        return project("qkv"), project("z").reshape(count, VALUE_HEADS, SIZE), project("b"), project("a")
    of_head = project("qkvz").reshape(count, KEY_HEADS, -1)
    queries, keys, values, gates = np.split(of_head, np.cumsum((SIZE, SIZE, _SHARE * SIZE)), axis=2)
    mixed = np.concatenate([one.reshape(count, -1) for one in (queries, keys, values)], axis=1)
    both = project("ba").reshape(count, KEY_HEADS, 2 * _SHARE)
    beta, alpha = (one.reshape(count, VALUE_HEADS) for one in (both[..., :_SHARE], both[..., _SHARE:]))
    return mixed, gates.reshape(count, VALUE_HEADS, SIZE), beta, alpha


def _unit(vectors: Array) -> Array:
    return np.asarray(vectors / np.sqrt((vectors**2).sum(axis=-1, keepdims=True) + EPSILON))


def _feed_forward(own: dict[str, Array], inputs: Array, kind: Kind) -> Array:
    if not kind.has_experts:
        return _fed(inputs, *(own[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
    chances = _softmax(inputs @ own["mlp.gate.weight"].T)
    outputs = np.stack([_fed(inputs, *_expert(own, number, kind)) for number in range(EXPERTS)], axis=1)
    chosen = np.argsort(-chances, axis=-1)[:, :USED]
    weights = np.take_along_axis(chances, chosen, axis=-1)
    found = (
        np.take_along_axis(outputs, chosen[..., None], axis=1)
        * (weights / weights.sum(axis=-1, keepdims=True))[..., None]
    )
    shared = _fed(inputs, *(own[f"mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")))
    return np.asarray(found.sum(axis=1) + shared * _sigmoid(inputs @ own["mlp.shared_expert_gate.weight"].T))


def _expert(own: dict[str, Array], number: int, kind: Kind) -> tuple[Array, Array, Array]:
    if kind.is_fused:
        gate, up, down = (own[f"mlp.experts.{number}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return gate, up, down
    both = own["mlp.experts.gate_up_proj"][number]
    return both[:INNER], both[INNER:], own["mlp.experts.down_proj"][number]


def _fed(inputs: Array, gate: Array, up: Array, down: Array) -> Array:
    return np.asarray((_silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T)
