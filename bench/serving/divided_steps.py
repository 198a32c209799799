"""Measures how much CPU time it saves to divide a step into passes by what attention costs.

Run: .venv/bin/python -m bench.serving.divided_steps [--model FILE.gguf] [--case turn|streams|many] [--pairs 7]

Both sides run in this process, on one thread and with the same weights. One computes each step in a single pass, as
llama-server does; the other divides it and fills tiles up (decision 0021). The cases:

    turn      a turn of 40 tokens behind 4,000 cached ones
    streams   a prompt of 512 tokens beside eight streams with 500 tokens each, in steps of 64 tokens
    many      72 streams with 100 tokens each"""

import asyncio
import functools
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from bench import benchmark_model, flags
from bench.paired import interleave, show
from tokenbus.worker.contract.engine_request import Sampling
from tokenbus.worker.contract.engine_settings import EngineSettings, SchedulerSettings
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.gguf import runner as gguf_runner
from tokenbus.worker.engine.gguf.model import GgufModel
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.process import scheduler_setup
from tokenbus.worker.engine.scheduling.sequence import Sequence

_BUDGET = 512
"""The prompt tokens of a step while nothing is measured."""


class Side:
    """An engine without its process: a context and its scheduler. `divides` says whether steps are divided."""

    def __init__(self, settings: EngineSettings, models: LoadedModels[GgufModel], *, divides: bool) -> None:
        runner = gguf_runner.load(settings, lambda _: None, models)
        assert isinstance(runner, gguf_runner.GgufRunner)
        assert runner.row_tiles is not None
        if not divides:
            runner.row_tiles = None
        self.divides = divides
        self._runner = runner
        pool = scheduler_setup.make_pool(runner, SchedulerSettings())
        self._scheduler = scheduler_setup.make_scheduler(runner, pool, SchedulerSettings(), None)
        self._count = 0

    def step(self, budget: int) -> None:
        plan = self._scheduler.schedule(budget)
        self._runner.apply(plan.kv_ops)
        self._scheduler.update(plan, self._runner.step(plan))

    def generate(self, token_ids: list[int], budget: int = 512, *, max_tokens: int = 1_000) -> None:
        """Starts a stream and computes up to its first token, with at most `budget` tokens of it a step."""
        self._count += 1
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        domain = Domain("bench", "", ())
        sequence = Sequence(self._count, array("I", token_ids), sampling, frozenset(), domain=domain)
        self._runner.add_sequence(sequence.seq_no, sampling)
        self._scheduler.add(sequence)
        while not sequence.num_sampled:
            self.step(budget)


Act = Callable[[int], None]
"""Does what is measured, with the number of the pair."""


def turn(side: Side) -> Act:
    session = benchmark_model.prompt(0, 4_000)
    side.generate(session, max_tokens=1)
    return lambda number: side.generate(session + benchmark_model.prompt(number + 1, 40), max_tokens=1)


def streams(side: Side) -> Act:
    for serial in range(8):
        side.generate(benchmark_model.prompt(serial, 500))
    budget = 64 if side.divides else 64 - 8
    return lambda number: side.generate(benchmark_model.prompt(number + 50, 512), budget, max_tokens=1)


def many(side: Side) -> Act:
    for serial in range(72):
        side.generate(benchmark_model.prompt(serial, 100))
    return lambda number: side.step(0)


_CASES = {"turn": turn, "streams": streams, "many": many}


async def measure(model: Path, case: str, pairs: int) -> None:
    settings = EngineSettings(
        model=str(model), threads=1, context_length=8_192, kv_tokens=32_768, max_num_seqs=80, host_cache_mib=0
    )
    models = LoadedModels[GgufModel]()
    whole, divided = (_CASES[case](Side(settings, models, divides=divides)) for divides in (False, True))

    async def run(act: Act, number: int) -> float:
        began = time.thread_time()
        act(number)
        return 1e3 * (time.thread_time() - began)

    seen = await interleave(functools.partial(run, whole), functools.partial(run, divided), pairs)
    print(f"{model.name}, {case}, {pairs} interleaved pairs, CPU time on one thread")
    show(("one pass a step", "divided"), "ms", seen)


def main() -> None:
    parser = flags.parser(__doc__, pairs=7)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--case", choices=_CASES, default="turn")
    options = parser.parse_args()
    with benchmark_model.model(options.model) as path:
        asyncio.run(measure(path, options.case, options.pairs))


if __name__ == "__main__":
    main()
