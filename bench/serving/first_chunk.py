"""Measures how much time the path through client, broker, router and worker adds to the first token.

Run: .venv/bin/python -m bench.serving.first_chunk [--pairs 101]

It sends prompts of 16 tokens to the demo model, one at a time, in turn: directly to an engine through an
`EngineClient` in this process, and through a whole system on this machine. The rest is what the system adds to its
engine and a bare exchange of the same bytes over three hops (client, forwarder, responder, client), which also takes
its turn."""

import asyncio
import json
import time

from bench import flags, streams, system
from bench.bare_hops import FIRST_HOP, bare_hops
from bench.paired import show_column, show_difference
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.demo import MODEL_PATH
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine_client import engine_process
from tokenbus.worker.engine_client.client import EngineClient

_PROMPT = list(range(10, 26))
_SETTINGS = EngineSettings(model=str(MODEL_PATH), threads=1, context_length=512, kv_tokens=4_096)


async def from_the_engine(engine: EngineClient, number: int) -> float:
    """Returns the milliseconds from the request to the first token."""
    began = time.perf_counter()
    first: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    ended = asyncio.Event()

    def take(output: engine_output.Output) -> None:
        if not first.done():
            first.set_result(time.perf_counter() - began)
        if output.finish_reason is not None:
            ended.set()

    sampling = engine_request.Sampling(max_tokens=2, ignore_eos=True)
    engine.generate(engine_request.EngineRequest(key=f"r{number}", token_ids=_PROMPT, sampling=sampling), take)
    await ended.wait()
    return 1e3 * await first


async def through_the_system(client: WireClient) -> float:
    """Returns the milliseconds from the request to the first token."""
    began = time.perf_counter()
    return 1e3 * ((await streams.complete(client, _PROMPT, 2))[0] - began)


async def measure(pairs: int) -> None:
    process = engine_process.EngineProcess()
    engine = EngineClient(lambda: process.open(_SETTINGS), max_waiting=4)
    await engine.start("bench")
    settings = ("--threads", "1", "--context-length", "512", "--kv-tokens", "4096")
    try:
        async with system.started(MODEL_PATH, settings) as running, bare_hops(running.nats_url) as wire:
            request = json.dumps({"token_ids": _PROMPT, "max_tokens": 2, "temperature": 0}).encode()
            seen, hops_ms = [], []
            for number in range(pairs + 5):
                seen.append((await from_the_engine(engine, number), await through_the_system(running.client)))
                hops_ms.append(1e3 * await wire.first_s(FIRST_HOP, request))
    finally:
        await engine.cleanup()
    seen, hops_ms = seen[5:], hops_ms[5:]
    print(f"demo model, {len(_PROMPT)}-token prompt, {pairs} interleaved pairs, time to the first token")
    show_difference(("bare engine", "whole system"), "ms", seen)
    show_column("bare three hops", "ms", hops_ms)
    rest = [whole - engine - hops for (engine, whole), hops in zip(seen, hops_ms, strict=True)]
    show_column("rest", "ms", rest)


def main() -> None:
    options = flags.parser(__doc__, pairs=101).parse_args()
    asyncio.run(measure(options.pairs))


if __name__ == "__main__":
    main()
