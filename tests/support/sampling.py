"""Logits and sampling parameters for tests, and a draw that is written as its definition reads."""

import math
from collections.abc import Sequence as Listing

import numpy as np

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.device.draws import Matrix


def asked(**fields: object) -> engine_request.Sampling:
    return engine_request.Sampling(**({"max_tokens": 100} | fields))  # type: ignore[arg-type]


def matrix(*rows: Listing[float]) -> Matrix:
    return np.array(rows, np.float32)


def some_logits(seed: int, *shape: int) -> Matrix:
    return np.random.default_rng(seed).normal(0, 3, shape).astype(np.float32)


def reference(logits: Listing[float], sampling: engine_request.Sampling, place: float) -> tuple[int, float]:
    """The token, and how far the draw was from drawing another one: one after the other, with numbers as they are."""
    order = sorted(range(len(logits)), key=lambda token_id: -logits[token_id])
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [math.exp(logits[token_id] - logits[order[0]]) for token_id in order]
    whole = sum(weights)
    kept: list[int] = []
    before, margin = 0.0, 1.0
    for token_id, weight in zip(order, weights, strict=True):
        margin = min(margin, abs(before - sampling.top_p * whole) / whole) if sampling.top_p < 1 else margin
        margin = min(margin, abs(weight - sampling.min_p)) if sampling.min_p else margin
        if not kept or (before < sampling.top_p * whole and weight >= sampling.min_p):
            kept.append(token_id)
        before += weight
    heated = [math.exp((logits[token_id] - logits[order[0]]) / sampling.temperature) for token_id in kept]
    at, reached = place * sum(heated), 0.0
    for token_id, weight in zip(kept, heated, strict=True):
        reached += weight
        margin = min(margin, abs(reached - at) / sum(heated))
        if at < reached:
            return token_id, margin
    return kept[-1], margin
