"""Compares embedding many texts in batches with one at a time, and with llama-cpp-python's own `embed`.

Run: .venv/bin/python -m bench.serving.embed [--preset minilm] [--pairs 9]

The model has random weights. All sides take turns on the same texts, each with one thread and flash attention, from
text to vectors; the result is CPU time."""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np

from bench.models import random_encoder
from bench.paired import cpu_seconds, quartiles
from tokenbus.protocol.telemetry import logs
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.runner import Embedder
from tokenbus.worker.engine.gguf.runner import load

_WORDS = ["the", "fox", "and", "an", "owl", "met", "at", "7,", "by", "a", "lake;", "it", "was", "cold."]
_BATCH_TOKENS = 512
_BATCH_INPUTS = 64


def _texts(count: int, words: int, rng: np.random.Generator) -> list[str]:
    return [" ".join(rng.choice(_WORDS, size=int(size))) for size in rng.integers(words // 2, words + 1, count)]


def _pooled(embedder: Embedder, batch: list[list[int]]) -> np.ndarray:
    rows = embedder.begin(batch).advance(_BATCH_TOKENS)
    assert rows is not None
    return rows


def _batched(embedder: Embedder, texts: list[str]) -> np.ndarray:
    """Fills batches as a worker's step loop does."""
    rows, batch, total = [], list[list[int]](), 0
    for token_ids in map(embedder.tokenize, texts):
        longest = max(map(len, [*batch, token_ids]))
        if batch and not embedder.batch_limits.allow(len(batch) + 1, total + len(token_ids), longest):
            rows.append(_pooled(embedder, batch))
            batch, total = [], 0
        batch.append(token_ids)
        total += len(token_ids)
    return np.concatenate([*rows, _pooled(embedder, batch)])


def _one_by_one(embedder: Embedder, texts: list[str]) -> np.ndarray:
    return np.concatenate([_pooled(embedder, [embedder.tokenize(text)]) for text in texts])


def _same(found: np.ndarray, other: np.ndarray) -> bool:
    cosines = (found * other).sum(axis=1) / np.linalg.norm(found, axis=1) / np.linalg.norm(other, axis=1)
    return bool((cosines > 1 - 1e-4).all())


def main() -> None:
    logs.configure("bench")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", choices=random_encoder.PRESETS, default="minilm")
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "encoder.gguf")
        random_encoder.write(path, random_encoder.PRESETS[options.preset], half=True)
        runner = load(EngineSettings(model=str(path), threads=1, flash_attention="on"), lambda share: None)
        embedder = runner.embedder
        assert embedder is not None
        binding = llama_cpp.Llama(
            str(path), embedding=True, n_ctx=_BATCH_TOKENS, n_batch=_BATCH_TOKENS, n_ubatch=_BATCH_TOKENS,
            n_seq_max=_BATCH_INPUTS, kv_unified=True, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        for name, texts in (("short", _texts(128, 8, rng)), ("long", _texts(16, 80, rng))):
            tokens = sum(len(embedder.tokenize(text)) for text in texts)
            sides: tuple[Callable[[], object], ...] = (
                lambda texts=texts: _batched(embedder, texts),  # type: ignore[misc]
                lambda texts=texts: _one_by_one(embedder, texts),  # type: ignore[misc]
                lambda texts=texts: binding.embed(texts),  # type: ignore[misc]
            )
            batched, alone, theirs = (np.array(side()) for side in sides)
            assert _same(batched, alone)
            assert _same(batched, theirs)
            times = [[cpu_seconds(lambda side=side: side()) for side in sides] for _ in range(options.pairs)]  # type: ignore[misc]
            speeds = [tokens / statistics.median(column) for column in zip(*times, strict=True)]
            print(
                f"{name} texts, {tokens / len(texts):.0f} tokens each: {speeds[0]:.0f} tokens/s in batches; "
                f"one by one {speeds[1]:.0f}, ratio {quartiles([time[1] / time[0] for time in times])}; "
                f"llama-cpp-python {speeds[2]:.0f}, ratio {quartiles([time[2] / time[0] for time in times])}"
            )
        binding.close()
        runner.close()


if __name__ == "__main__":
    main()
