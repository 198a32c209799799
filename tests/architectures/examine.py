"""Holds the answers that our engine gives with a tiny model of one architecture against bare llama.cpp's.

    python -m tests.architectures.examine ARCHITECTURE

Prints what it finds as one line of JSON. llama.cpp may end this process instead."""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from llama_cpp import llama_cpp as llama

from tests.architectures import tiny_model
from tests.architectures.finding import Finding, Outcome
from tests.architectures.hyperparameters import VOCABULARY
from tests.contracts import driving
from tests.support.engines import Recorder, demo_engine
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import EngineDiedError

NUM_STREAMS = 12
_SHARED, _OWN, _ANSWER = 64, 10, 24
_KV_TOKENS = 768
"""Less than the streams need together: 12 of 98 tokens, if they share nothing."""
_NOISE = 1e-3
"""The logits by which an answer's token may be below the best, as a share of their standard deviation, besides four
times what bare llama.cpp differs from itself when a prompt is computed in parts."""
_MAX_OWN_NOISE = 0.02
"""A model that differs more from itself proves nothing about its answers."""


class Turn(NamedTuple):
    """A prompt and the tokens that the engine answered."""

    prompt: list[int]
    answer: list[int]


def settings_of(model: Path) -> EngineSettings:
    """Returns settings with which a token's logits hardly depend on the batch that it is computed in."""
    return EngineSettings(
        model=str(model),
        threads=1,
        max_num_seqs=NUM_STREAMS,
        context_length=256,
        kv_tokens=_KV_TOKENS,
        max_num_batched_tokens=128,
        flash_attention="off",
        cache_type_k="f32",
        cache_type_v="f32",
    )


async def examine(model: Path) -> Finding:
    """Asks two engines, the second one after the first was killed, and compares all answers."""
    engine = demo_engine(settings_of(model))
    try:
        config = await engine.start("w")
    except ModelError as error:
        return Finding(Outcome.REFUSED, reason=str(error).replace(f"{model}: ", ""))
    except EngineDiedError as error:
        return Finding(Outcome.DIED, reason=str(error))
    draw = np.random.default_rng(1)
    shared = draw.integers(5, VOCABULARY, _SHARED).tolist()
    prompts = [[*shared, *draw.integers(5, VOCABULARY, _OWN).tolist()] for _ in range(NUM_STREAMS)]
    turns, _ = await _ask(engine, prompts[:1])
    several, cached = await _ask(engine, prompts)
    os.kill(config.pid, signal.SIGKILL)
    await engine.died()
    await engine.close()
    successor = demo_engine(settings_of(model))
    await successor.start("w")
    continued, _ = await _ask(successor, [turn.prompt + turn.answer for turn in several])
    await successor.close()
    wrong = _wrong(model, [*turns, *several, *continued])
    if config.checkpoint_sizes is not None:
        outcome = Outcome.CHECKPOINTS
    else:
        outcome = Outcome.CELLS if config.prefix_cache else Outcome.NO_REUSE
    return Finding(outcome, reason=wrong, cached_tokens=cached, apart="batches" in config.missing)


async def _ask(engine: EngineClient, prompts: Sequence[list[int]]) -> tuple[list[Turn], int]:
    """Asks all at once; returns their answers, and how many tokens of prompts were cached."""
    recorders = [
        driving.start(engine, driving.request(prompt, max_tokens=_ANSWER, temperature=0.0)) for prompt in prompts
    ]
    await asyncio.gather(*(recorder.terminal() for recorder in recorders))
    turns = [Turn(prompt, recorder.token_ids) for prompt, recorder in zip(prompts, recorders, strict=True)]
    return turns, sum(map(_cached, recorders))


def _cached(recorder: Recorder) -> int:
    end = recorder.terminals[0]
    assert end.usage is not None, end
    return end.usage.cached_tokens


def _wrong(model: Path, turns: Sequence[Turn]) -> str:
    """Says which answers bare llama.cpp would not have given; empty if it would have given all."""
    bare = Bare(model)
    noise = bare.noise(turns[0])
    shortfalls = [bare.shortfall(turn) for turn in turns]
    if noise > _MAX_OWN_NOISE:
        return f"not compared: logits of the tiny model itself differ by {noise:.2g} deviations, by batch"
    wrong = sum(shortfall > _NOISE + 4 * noise for shortfall in shortfalls)
    if not wrong:
        return ""
    return f"{wrong} of {len(turns)} answers differ from bare llama.cpp's by up to {max(shortfalls):.2g} deviations"


class Bare:
    """llama.cpp without our engine: one sequence."""

    def __init__(self, model: Path) -> None:
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        loaded = llama.llama_model_load_from_file(str(model).encode(), params)
        assert loaded is not None
        settings = llama.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
        settings.n_threads = settings.n_threads_batch = 1
        settings.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.type_k = settings.type_v = 0  # f32
        made = llama.llama_init_from_model(loaded, settings)
        assert made is not None
        self._context = made
        vocabulary = llama.llama_model_get_vocab(loaded)
        assert vocabulary is not None
        self._ends = [one for one in range(VOCABULARY) if llama.llama_vocab_is_eog(vocabulary, one)]

    def noise(self, turn: Turn) -> float:
        """Returns how much the logits after a prompt depend on the parts in which it is computed."""
        whole, half = self._after([turn.prompt])[-1], len(turn.prompt) // 2
        splits = ([turn.prompt[:half], turn.prompt[half:]], [[token_id] for token_id in turn.prompt])
        return max(float(np.abs(whole - self._after(parts)[-1]).max() / whole.std()) for parts in splits)

    def shortfall(self, turn: Turn) -> float:
        """Returns by how much the logit of an answer's token is below the best one, at the most. No answer ends."""
        rows = self._after([turn.prompt, *([token_id] for token_id in turn.answer[:-1])])
        for row in rows:
            row[self._ends] = row.min()
        return max(
            float((row.max() - row[token_id]) / row.std()) for row, token_id in zip(rows, turn.answer, strict=True)
        )

    def _after(self, parts: Sequence[Sequence[int]]) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
        """Computes parts of one sequence one after another; returns the logits after each."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        rows = []
        for part in parts:
            tokens = (llama.llama_token * len(part))(*part)
            assert llama.llama_decode(self._context, llama.llama_batch_get_one(tokens, len(part))) == 0
            rows.append(np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, -1), (VOCABULARY,)).copy())
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.architectures.examine", allow_abbrev=False)
    parser.add_argument("architecture")
    architecture = parser.parse_args().architecture
    with tempfile.TemporaryDirectory(prefix="tokenbus-architectures-") as folder:
        model = Path(folder, f"{architecture}.gguf")
        try:
            tiny_model.write(model, architecture)
        except tiny_model.UnwritableError as error:
            finding = Finding(Outcome.NOT_WRITTEN, reason=str(error))
        else:
            finding = asyncio.run(asyncio.wait_for(examine(model), 120))
    sys.stdout.write(msgspec.json.encode(finding).decode() + "\n")


if __name__ == "__main__":
    main()
