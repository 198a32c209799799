"""Embeddings by a generative model: their effect on its streams, and their speed.

Run: .venv/bin/python -m bench.serving.embed_beside [--preset SHAPE --pooling last --rounds 5]

Gaps: a step loop serves four streams, alone, beside prompts, and beside inputs to embed with as many tokens, one after
another in each round. The longest time between two tokens of a stream beside inputs is divided by that beside prompts,
which are cut for the same target. Speed: the same inputs are embedded by the model that generates and by a file with
the same weights that names its pooling, in turns. All times are CPU seconds of one thread, including those by which the
step loop decides, so that other load on the machine matters little."""

import itertools
import queue
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np

from bench import flags
from bench.models import random_model
from bench.models.shape import PRESETS
from bench.paired import cpu_seconds, quartiles
from tokenbus.protocol.wire import block_hash, internal
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device import pooling
from tokenbus.worker.engine.device.runner import Embedder, Runner
from tokenbus.worker.engine.gguf.runner import GgufRunner, load
from tokenbus.worker.engine.process import ipc, loop
from tokenbus.worker.engine.scheduling import step_budget

_STREAMS = 4
_STREAM_PROMPT = 64
_TEXTS, _TEXT_TOKENS = 4, 300
_CONTEXT = 1_024
_TARGET_S = 0.4
Load = Literal["nothing", "prompts", "inputs"]


class Beside:
    """Four streams of a runner, beside a load."""

    def __init__(self, runner: GgufRunner, rng: np.random.Generator) -> None:
        self._runner = runner
        self._rng = rng

    def longest_gap(self, beside: Load) -> float:
        """Returns the longest time between two tokens of a stream, from the load's arrival until its end."""
        inbox: loop.Inbox = queue.SimpleQueue()
        arrived: dict[int, list[float]] = {number: [] for number in range(_STREAMS)}
        load_began, load_over = [0.0], [0.0]
        left: set[int] = set()

        def report(said: ipc.Report) -> None:
            now = time.process_time()
            match said:
                case ipc.StepReport(outputs=outputs):
                    for output in outputs:
                        if output.seq_no in arrived:
                            arrived[output.seq_no].append(now)
                        elif output.finish_reason is not None:
                            left.discard(output.seq_no)
                case ipc.PoolResult(error=error):
                    assert error is None, error
                    left.clear()
            if not load_began[0] and all(len(times) > 3 for times in arrived.values()):
                load_began[0] = now
                left.update(self._add(inbox, beside))
            elif load_began[0] and not left and min(map(len, arrived.values())) > 12:
                load_over[0] = load_over[0] or now
                inbox.put(None)

        for number in arrived:
            inbox.put(self._sequence(number, _STREAM_PROMPT, 400))
        worker = loop.StepLoop(self._runner, inbox, report, _TARGET_S)
        thread = threading.Thread(target=worker.run)
        thread.start()
        thread.join()
        for number in arrived:
            self._runner.remove_sequence(number)
        self._runner.lanes.clear()
        spans = [
            (before, after)
            for times in arrived.values()
            for before, after in itertools.pairwise(times)
            if before >= load_began[0] and after <= load_over[0]
        ]
        return max(after - before for before, after in spans)

    def _add(self, inbox: loop.Inbox, beside: Load) -> set[int]:
        """Puts the load into the inbox; returns the numbers of the requests that must end before it is over."""
        if beside == "prompts":
            numbers = range(_STREAMS, _STREAMS + _TEXTS)
            for number in numbers:
                inbox.put(self._sequence(number, _TEXT_TOKENS, 1))
            return set(numbers)
        if beside == "inputs":
            inputs: list[str | list[int]] = [self._tokens(_TEXT_TOKENS) for _ in range(_TEXTS)]
            request = internal.Embed(inputs=inputs, remaining_ms=600_000)
            inbox.put(pooling.embed_job(1, request, self._runner.embedder, time.process_time()))
            return {-1}
        return set()

    def _sequence(self, number: int, num_prompt: int, max_tokens: int) -> ipc.Add:
        sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
        return ipc.Add(number, block_hash.pack_token_ids(self._tokens(num_prompt)), sampling)

    def _tokens(self, count: int) -> list[int]:
        found: list[int] = self._rng.integers(5, self._runner.config.vocab_size, count).tolist()
        return found


def _embed(embedder: Embedder, inputs: list[list[int]]) -> np.ndarray:
    """Fills batches as a worker's step loop does."""
    rows, batch = [], list[list[int]]()
    for one in inputs:
        lengths = [len(one), *map(len, batch)]
        if batch and not embedder.batch_limits.allow(len(lengths), sum(lengths), max(lengths)):
            rows.append(embedder.begin(batch).advance(1 << 20))
            batch = []
        batch.append(one)
    rows.append(embedder.begin(batch).advance(1 << 20))
    return np.concatenate([one for one in rows if one is not None])


def compare_speed(generates: Runner, embeds: Runner, rounds: int, rng: np.random.Generator) -> None:
    ours, theirs = generates.embedder, embeds.embedder
    assert ours is not None
    assert theirs is not None
    for name, count, length in (("short", 32, 16), ("long", 2, 400)):
        inputs = [rng.integers(5, ours.vocab_size, length).tolist() for _ in range(count)]
        rows = [_embed(one, inputs) for one in (ours, theirs)]
        cosines = (rows[0] * rows[1]).sum(axis=1) / np.linalg.norm(rows[0], axis=1) / np.linalg.norm(rows[1], axis=1)
        assert (cosines > 1 - 1e-3).all(), cosines
        works = [partial(_embed, one, inputs) for one in (theirs, ours)]
        pairs = [[cpu_seconds(work) for work in works] for _ in range(rounds)]
        speed = count * length / statistics.median(pair[1] for pair in pairs)
        ratio = quartiles([other / own for other, own in pairs])
        print(
            f"{name} inputs, {length} tokens each: {speed:.0f} tokens/s, of a model for embeddings {ratio}", flush=True
        )


def compare_gaps(runner: GgufRunner, rounds: int, rng: np.random.Generator) -> None:
    cpu_clock = SimpleNamespace(monotonic=time.process_time)
    for module in (loop, pooling, step_budget):
        module.time = cpu_clock  # type: ignore[attr-defined]
    beside = Beside(runner, rng)
    loads: tuple[Load, ...] = ("nothing", "prompts", "inputs")
    gaps = []
    for number in range(rounds + 1):
        found = [beside.longest_gap(one) for one in loads]
        if number:  # the first round warms up
            gaps.append(found)
            print(
                "longest gap " + ", ".join(f"beside {one}: {gap:.3f} s" for one, gap in zip(loads, found, strict=True))
            )
    print(f"beside inputs / beside prompts: {quartiles([one[2] / one[1] for one in gaps])}")
    print(f"beside inputs / target of a step ({_TARGET_S} s): {quartiles([one[2] / _TARGET_S for one in gaps])}")


def main() -> None:
    parser = flags.parser(__doc__, threads=1, rounds=5)
    parser.add_argument("--preset", choices=PRESETS, default="0.5b", help="the shape of the model (%(default)s)")
    parser.add_argument("--pooling", choices=("last", "mean"), default="last")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("generates.gguf", "embeds.gguf")]
        shape = PRESETS[options.preset]
        random_model.write(paths[0], shape, "q8_0")
        random_model.write(paths[1], shape, "q8_0", pooling=options.pooling)
        settings = [
            EngineSettings(
                model=str(path),
                threads=options.threads,
                host_cache_mib=0,
                context_length=_CONTEXT,
                kv_tokens=8 * _CONTEXT,
                pooling=options.pooling,
            )
            for path in paths
        ]
        generates, embeds = (load(one, lambda share: None) for one in settings)
        compare_speed(generates, embeds, options.rounds, rng)
        embeds.close()
        assert isinstance(generates, GgufRunner)
        compare_gaps(generates, options.rounds, rng)
        generates.close()


if __name__ == "__main__":
    main()
