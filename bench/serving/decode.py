"""Compares the decoding speed of the whole system with the same loop written directly on llama_cpp.

Run: .venv/bin/python -m bench.serving.decode [--model FILE.gguf] [--streams 1] [--tokens 48] [--threads 1] [--pairs 7]

Both decode the same number of tokens on the same model with the same threads, in interleaved pairs. The time runs from
the first token of all streams to the last. Without --model, a 0.5B model in Q8_0 with random weights is made."""

import asyncio
import statistics
import time
from pathlib import Path

import msgspec

from bench import flags, system
from bench.baselines import bare_llama
from bench.baselines.child import Child
from bench.models import benchmark_model
from bench.paired import quartiles
from tokenbus.client import Client
from tokenbus.protocol.wire import messages

CONTEXT = 4_096


class Timing(msgspec.Struct, frozen=True):
    wall_s: float
    cpu_s: float


async def through_the_system(client: Client, engine_pid: int, streams: int, tokens: int) -> Timing:
    """Returns the time from when every stream has its first token until every stream has its last."""
    everyone = asyncio.Barrier(streams)
    times: list[float] = []
    cpu: list[float] = []

    async def read(number: int) -> None:
        request = messages.GenerateRequest(
            token_ids=bare_llama.PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True
        )
        num_tokens = 0
        async for chunk in client.generate("m", request):
            if chunk.error:
                raise SystemExit(f"the system refused: {chunk.error.message}")
            if chunk.tokens and not num_tokens:
                await everyone.wait()
                times.append(time.perf_counter())
                cpu.append(system.cpu_seconds(engine_pid))
            num_tokens += chunk.tokens
        assert num_tokens == tokens

    await asyncio.gather(*(read(number) for number in range(streams)))
    return Timing(time.perf_counter() - max(times), system.cpu_seconds(engine_pid) - max(cpu))


async def measure(model: Path, streams: int, tokens: int, threads: int, pairs: int) -> None:
    bare = Child("bench.baselines.bare_llama", model, threads, CONTEXT)
    settings = ("--threads", str(threads), "--kv-tokens", str(CONTEXT), "--max-num-seqs", "64")
    try:
        async with system.running(model, *settings, "--context-length", "1024") as client:
            pid = (await system.card(client)).pids.engine
            ask = f"{streams} {tokens}"
            bare.call(ask)
            await through_the_system(client, pid, streams, tokens)
            seen = []
            for _ in range(pairs):
                alone = msgspec.json.decode(await asyncio.to_thread(bare.call, ask), type=Timing)
                seen.append((alone, await through_the_system(client, pid, streams, tokens)))
    finally:
        bare.close()
    decoded = streams * (tokens - 1)
    alone_s = statistics.median(alone.wall_s for alone, _ in seen)
    system_s = statistics.median(whole.wall_s for _, whole in seen)
    print(f"{model.name}, {streams} streams of {tokens} tokens, {threads} threads, {pairs} interleaved pairs")
    print(f"  llama_cpp alone     {decoded / alone_s:8.1f} tokens/s")
    print(f"  the whole system    {decoded / system_s:8.1f} tokens/s")
    print(f"  speed, system / alone        {quartiles([a.wall_s / w.wall_s for a, w in seen])}")
    print(f"  engine CPU, alone / system   {quartiles([a.cpu_s / w.cpu_s for a, w in seen])}")


def main() -> None:
    parser = flags.model_parser(__doc__, streams=1, tokens=48, threads=1, pairs=7)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.streams, options.tokens, options.threads, options.pairs))


if __name__ == "__main__":
    main()
