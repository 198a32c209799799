"""Measures models that are loaded on demand.

Run: .venv/bin/python -m bench.serving.on_demand first|gaps|ten [--cold FILE.gguf] [--rounds 5] [--requests 200]

`first`: the first token of a cold model, compared with a bare load of its engine and the same prompt once it is loaded.
`gaps`: the longest gap in streams of the demo model while the cold model loads, compared with the same time before.
`ten`: the demo model under ten names, with room for three, asked at random by four clients at a time."""

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from bench import flags, system
from tokenbus import demo
from tokenbus.client import Client
from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import messages
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import EngineProcess
from tokenbus.worker.on_demand import model_facts, sizes

_MIB = 1 << 20
_PROMPT_TOKENS = 64
_SAMPLE_S = 0.02
_numbers = random.Random(5)


async def ask(client: Client, model: str, max_tokens: int) -> list[float]:
    """Sends a prompt that no worker has cached; returns when it was sent and when each token arrived."""
    prompt = [_numbers.randrange(300, 600) for _ in range(_PROMPT_TOKENS)]
    request = messages.GenerateRequest(token_ids=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    times = [time.perf_counter()]
    async for chunk in client.generate(model, request):
        if chunk.error:
            raise SystemExit(f"the system refused: {chunk.error.message}")
        times += [time.perf_counter()] * chunk.tokens
    assert len(times) == max_tokens + 1, (model, len(times))
    return times


async def bare_load_s(cold: Path) -> float:
    """Returns how long an engine needs to start with a model, without a bus."""
    process = EngineProcess({logs.LEVEL_VARIABLE: "error"})
    settings = EngineSettings(model=str(cold), threads=1, host_cache_mib=0)
    engine = EngineClient(lambda: process.open(settings), 0)
    began = time.perf_counter()
    await engine.start("bare")
    seconds = time.perf_counter() - began
    await engine.cleanup()
    return seconds


def need_mib(model: Path) -> int:
    settings = EngineSettings(model=str(model), host_cache_mib=0)
    need = sizes.choose(model_facts.read(settings, lambda _: None), settings, 0)
    return -(-need.total_bytes // _MIB)


@contextlib.asynccontextmanager
async def running(models: dict[str, Path], room_mib: int, *worker: str) -> AsyncIterator[system.System]:
    """Starts a system with the demo model pinned as `m`, and other models on demand within a memory budget."""
    more = [flag for name, path in models.items() for flag in ("--model", str(path), "--served-name", name)]
    budget = str(need_mib(demo.MODEL_PATH) + room_mib + 1)
    arguments = (*more, "--pin", "m", "--memory-budget-mib", budget, "--threads", "1", *worker)
    async with system.started(demo.MODEL_PATH, arguments) as one:
        yield one


async def until_unloaded(client: Client, model: str) -> None:
    while True:
        served = {one.model: one for one in (await client.models()).models}
        if model in served and served[model].loadable is True:
            return
        await asyncio.sleep(0.1)


async def measure_first(cold: Path, rounds: int) -> None:
    over = []
    async with running({"cold": cold}, need_mib(cold), "--idle-unload-s", "1") as one:
        await until_unloaded(one.client, "cold")
        await ask(one.client, "cold", 1)  # its file is now in the page cache
        for number in range(rounds):
            await until_unloaded(one.client, "cold")
            bare = await bare_load_s(cold)
            sent, first = await ask(one.client, "cold", 1)
            warm_sent, warm_first = await ask(one.client, "cold", 1)
            whole, prompt = first - sent, warm_first - warm_sent
            over.append(whole - bare - prompt)
            print(f"  round {number + 1}: {whole:.2f} s, bare load {bare:.2f} s, prompt {prompt:.2f} s", flush=True)
    print(f"first token of {cold.name}, beyond bare load and prompt: median {statistics.median(over):+.2f} s,", end=" ")
    print(f"at most {max(over):+.2f} s")


async def longest_gap_s(client: Client, window_s: float) -> float:
    """Returns the longest time between two tokens of a stream of the demo model, within the given seconds."""
    gap, end = 0.0, time.perf_counter() + window_s
    while time.perf_counter() < end:
        times = (await ask(client, "m", 400))[1:]
        inside = [at for at in times if at < end]
        gap = max([gap, *(second - first for first, second in itertools.pairwise(inside))])
    return gap


async def measure_gaps(cold: Path, rounds: int) -> None:
    ratios = []
    async with running({"cold": cold}, need_mib(cold), "--idle-unload-s", "1") as one:
        await until_unloaded(one.client, "cold")
        began = time.perf_counter()
        await ask(one.client, "cold", 1)
        window_s = max(2.0, time.perf_counter() - began)
        for number in range(rounds):
            await until_unloaded(one.client, "cold")
            before = await longest_gap_s(one.client, window_s)
            load = asyncio.create_task(ask(one.client, "cold", 1))
            beside = await longest_gap_s(one.client, window_s)
            await load
            ratios.append(beside / before)
            print(f"  round {number + 1}: {before * 1e3:.0f} ms, beside the load {beside * 1e3:.0f} ms", flush=True)
    print(f"longest gap beside the load of {cold.name}, compared with before: median {statistics.median(ratios):.2f}")


def engine_memory(parent: int) -> Iterator[int]:
    """Yields the resident bytes of each engine process of a worker."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, StopIteration):
            if b"engine.process.main" not in (path / "cmdline").read_bytes():
                continue
            lines = dict(line.split(":", 1) for line in (path / "status").read_text().splitlines())
            if int(lines["PPid"]) == parent:
                yield int(lines["VmRSS"].split()[0]) << 10


async def measure_ten(requests: int) -> None:
    names = [f"m{number}" for number in range(10)]
    each = need_mib(demo.MODEL_PATH)
    most, num_engines = 0, 0
    async with running(dict.fromkeys(names, demo.MODEL_PATH), 3 * each) as one:
        card = await system.card(one.client)
        queue = [_numbers.choice(names) for _ in range(requests)]
        waits = []

        async def client() -> None:
            while queue:
                sent, first, *_ = await ask(one.client, queue.pop(), 32)
                waits.append(first - sent)

        tasks = [asyncio.create_task(client()) for _ in range(4)]
        began = time.perf_counter()
        while not all(task.done() for task in tasks):
            memory = list(engine_memory(card.pids.front))
            most, num_engines = max(most, sum(memory)), max(num_engines, len(memory))
            await asyncio.sleep(_SAMPLE_S)
        for task in tasks:
            task.result()
        seconds = time.perf_counter() - began
        lines = (one.folder / "worker.log").read_text().splitlines()
        log = [json.loads(line) for line in lines if line.startswith("{")]
    loaded: set[str] = set()
    loads = doubles = 0
    for line in log:
        if line["event"] == "model_loaded":
            loads, doubles = loads + 1, doubles + (line["model"] in loaded)
            loaded.add(line["model"])
        elif line["event"] == "model_unloaded":
            loaded.discard(line["model"])
    print(f"{requests} requests for ten models with room for three: {len(waits)} answered in {seconds:.0f} s")
    print(
        f"  {loads} loads, {doubles} of a model that was loaded; at most {num_engines} engines, the pinned one included"
    )
    print(f"  memory of engines at most {most / _MIB:.0f} MiB, budget {4 * each + 1} MiB")
    print(f"  first token: median {statistics.median(waits):.2f} s, at most {max(waits):.2f} s")


def main() -> None:
    parser = flags.parser(__doc__, rounds=5, requests=200)
    parser.add_argument("what", choices=("first", "gaps", "ten"))
    parser.add_argument("--cold", type=Path, default=demo.MODEL_PATH, help="the model that is loaded (the demo model)")
    options = parser.parse_args()
    logs.log_errors_only()
    if options.what == "first":
        asyncio.run(measure_first(options.cold, options.rounds))
    elif options.what == "gaps":
        asyncio.run(measure_gaps(options.cold, options.rounds))
    else:
        asyncio.run(measure_ten(options.requests))


if __name__ == "__main__":
    main()
