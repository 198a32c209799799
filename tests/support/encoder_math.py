"""Computes with numpy, and nothing of llama.cpp, what random encoders (models/random_encoder.py) compute."""

from pathlib import Path

import gguf
import numpy as np

from tests.support.models.random_encoder import EPSILON, ROPE_BASE, EncoderShape, Weights


def read_weights(path: Path) -> Weights:
    return {tensor.name: tensor.data.astype(np.float64) for tensor in gguf.GGUFReader(path).tensors}


def row(weights: Weights, shape: EncoderShape, token_ids: list[int]) -> np.ndarray:
    """Returns the row of one input as llama.cpp gives it: a vector, or the outputs of the classification head."""
    states = (_bert if shape.arch == "bert" else _qwen3)(weights, shape, token_ids)
    first, last = states[0], states[-1]
    match shape.pooling:
        case "mean":
            return np.asarray(states.mean(axis=0))
        case "cls":
            return np.asarray(first)
        case "last":
            return np.asarray(last)
    if shape.arch == "bert":
        inner = np.tanh(weights["cls.weight"] @ first + weights["cls.bias"])
        return np.asarray(weights["cls.output.weight"] @ inner + weights["cls.output.bias"])
    return np.asarray(_softmax(weights["cls.output.weight"] @ last))


def _bert(weights: Weights, shape: EncoderShape, token_ids: list[int]) -> np.ndarray:
    count = len(token_ids)
    states = weights["token_embd.weight"][token_ids] + weights["token_types.weight"][0]
    states = _layer_norm(weights, "token_embd_norm", states + weights["position_embd.weight"][:count])
    for layer in range(shape.layers):

        def linear(part: str, inputs: np.ndarray, layer: int = layer) -> np.ndarray:
            name = f"blk.{layer}.{part}"
            return np.asarray(inputs @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])

        queries, keys, values = (_heads(linear(f"attn_{part}", states), shape) for part in "qkv")
        attended = linear("attn_output", _attention(queries, keys, values, np.zeros((count, count))))
        states = _layer_norm(weights, f"blk.{layer}.attn_output_norm", states + attended)
        fed = linear("ffn_down", _gelu(linear("ffn_up", states)))
        states = _layer_norm(weights, f"blk.{layer}.layer_output_norm", states + fed)
    return states


def _qwen3(weights: Weights, shape: EncoderShape, token_ids: list[int]) -> np.ndarray:
    count = len(token_ids)
    states = weights["token_embd.weight"][token_ids]
    mask = np.triu(np.full((count, count), -np.inf), 1)
    for layer in range(shape.layers):

        def weight(part: str, layer: int = layer) -> np.ndarray:
            return weights[f"blk.{layer}.{part}.weight"]

        inputs = _rms_norm(weight("attn_norm"), states)
        queries, keys, values = (_heads(inputs @ weight(f"attn_{part}").T, shape) for part in "qkv")
        queries, keys = (
            _rotate(_rms_norm(weight(f"attn_{part}_norm"), heads)) for part, heads in (("q", queries), ("k", keys))
        )
        states = states + _attention(queries, keys, values, mask) @ weight("attn_output").T
        inputs = _rms_norm(weight("ffn_norm"), states)
        gate = inputs @ weight("ffn_gate").T
        states = states + (gate / (1 + np.exp(-gate)) * (inputs @ weight("ffn_up").T)) @ weight("ffn_down").T
    return _rms_norm(weights["output_norm.weight"], states)


def _heads(flat: np.ndarray, shape: EncoderShape) -> np.ndarray:
    """Returns (heads, tokens, width of a head)."""
    return flat.reshape(len(flat), shape.heads, -1).transpose(1, 0, 2)


def _attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(queries.shape[-1]) + mask
    mixed = _softmax(scores) @ values
    return np.asarray(mixed.transpose(1, 0, 2).reshape(queries.shape[1], -1))


def _rotate(heads: np.ndarray) -> np.ndarray:
    """Rotates each pair of numbers (i, i + half) by an angle that grows with the position, as in GPT-NeoX."""
    count, half = heads.shape[1], heads.shape[2] // 2
    angles = np.arange(count)[:, None] * ROPE_BASE ** (-np.arange(half) / half)
    low, high = heads[..., :half], heads[..., half:]
    rotated = (low * np.cos(angles) - high * np.sin(angles), low * np.sin(angles) + high * np.cos(angles))
    return np.concatenate(rotated, axis=-1)


def _layer_norm(weights: Weights, name: str, states: np.ndarray) -> np.ndarray:
    centred = states - states.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPSILON)
    return np.asarray(scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"])


def _rms_norm(weight: np.ndarray, states: np.ndarray) -> np.ndarray:
    return np.asarray(states / np.sqrt((states**2).mean(axis=-1, keepdims=True) + EPSILON) * weight)


def _gelu(numbers: np.ndarray) -> np.ndarray:
    """The approximation with tanh, which ggml looks up in a table of 16-bit numbers."""
    rounded = numbers.astype(np.float16).astype(np.float32)
    inner = np.sqrt(2 / np.pi) * rounded * (1 + 0.044715 * rounded**2)
    return np.asarray((0.5 * rounded * (1 + np.tanh(inner))).astype(np.float16).astype(np.float64))


def _softmax(numbers: np.ndarray) -> np.ndarray:
    powers = np.exp(numbers - numbers.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
