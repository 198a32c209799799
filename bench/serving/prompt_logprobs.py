"""Measures what the log probabilities of a prompt cost, compared with the same prompt without them.

Run: .venv/bin/python -m bench.serving.prompt_logprobs [--model demo/demo.gguf] [--gaps] [--pairs 7]

It sends prompts of 1,000 tokens to an engine, in interleaved pairs: without log probabilities, and with those of all
tokens and the likeliest five. The numbers are the CPU time of the engine's process, or with `--gaps` the longest gap of
four running streams while the prompt is computed."""

import asyncio
import itertools
import time
from pathlib import Path

from bench import benchmark_model, flags
from bench.paired import interleave, show
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine_client import engine_process
from tokenbus.worker.engine_client.client import EngineClient

_TOKENS = 1_000
_NUM_STREAMS = 4


class _Answer:
    """The times of an answer's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.num_scored = 0
        self.started, self.ended = asyncio.Event(), asyncio.Event()

    def __call__(self, output: engine_output.Output) -> None:
        self.num_scored += output.num_scored
        if output.token_ids:
            self.times.append(time.perf_counter())
            if len(self.times) > 8:
                self.started.set()
        if output.finish_reason is not None:
            self.ended.set()

    def longest_gap(self, since: float, until: float) -> float:
        times = [since, *(one for one in self.times if since < one < until), until]
        return max(after - before for before, after in itertools.pairwise(times))


def _start(engine: EngineClient, key: str, token_ids: list[int], **sampling: int) -> _Answer:
    answer = _Answer()
    asked = engine_request.Sampling(ignore_eos=True, **sampling)  # type: ignore[arg-type]
    engine.generate(engine_request.EngineRequest(key=key, token_ids=token_ids, sampling=asked), answer)
    return answer


def _cpu_s(pid: int) -> float:
    """Returns the CPU time of a process's threads."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def measure(model: Path, pairs: int, threads: int, *, gaps: bool) -> None:
    settings = EngineSettings(
        model=str(model), threads=threads, context_length=2_048, kv_tokens=32_768, max_num_seqs=8, host_cache_mib=0
    )
    process = engine_process.EngineProcess()
    engine = EngineClient(lambda: process.open(settings), max_waiting=16)
    config = await engine.start("bench")

    async def run(number: int, **wanted: int) -> float:
        engine.clear_cache()  # what it attends to includes what is cached
        streams = [
            _start(engine, f"s{number}-{one}-{len(wanted)}", benchmark_model.prompt(9_000 + one, 16), max_tokens=1_500)
            for one in range(_NUM_STREAMS if gaps else 0)
        ]
        for one in streams:
            await one.started.wait()
        began, cpu_s = time.perf_counter(), _cpu_s(config.pid)
        serial = 2 * number + bool(wanted)
        answer = _start(engine, f"p{serial}", benchmark_model.prompt(serial, _TOKENS), max_tokens=1, **wanted)
        await answer.ended.wait()
        ended = time.perf_counter()
        assert answer.num_scored == (_TOKENS if wanted else 0)
        spent_s = _cpu_s(config.pid) - cpu_s
        found = max(one.longest_gap(began, ended) for one in streams) if gaps else spent_s
        for place in range(len(streams)):
            engine.abort(f"s{number}-{place}-{len(wanted)}")
        return 1e3 * found

    async def plain(number: int) -> float:
        return await run(number)

    async def scored(number: int) -> float:
        return await run(number, prompt_logprobs=5)

    try:
        seen = await interleave(plain, scored, pairs)
    finally:
        await engine.cleanup()
    what = f"longest gap of {_NUM_STREAMS} streams" if gaps else "CPU time of the engine"
    print(f"{model.name}, {_TOKENS}-token prompt, {pairs} interleaved pairs, {what}")
    show(("plain", "log probabilities"), "ms", seen)


def main() -> None:
    parser = flags.parser(__doc__, pairs=7)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gaps", action="store_true")
    options = parser.parse_args()
    with benchmark_model.model(options.model) as path:
        asyncio.run(measure(path, options.pairs, options.threads, gaps=options.gaps))


if __name__ == "__main__":
    main()
