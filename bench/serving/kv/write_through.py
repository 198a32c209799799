"""Measures the cost of copying every block to host memory as soon as it is complete.

Run: .venv/bin/python -m bench.serving.kv.write_through [--model FILE.gguf] [--streams 8] [--pairs 7]

Two workers take turns: one copies blocks when they are complete, the other only when they have to leave the device. The
prompt of every stream is new."""

import asyncio
import itertools
import statistics
import time
from pathlib import Path

from bench import flags, streams, system
from bench.models import benchmark_model
from bench.paired import quartiles
from tokenbus.client import Client

_PROMPT_TOKENS = 64
_serials = itertools.count()


def _new_prompt() -> list[int]:
    return benchmark_model.prompt(next(_serials), _PROMPT_TOKENS)


async def of_new_streams(client: Client, pid: int, count: int, tokens: int) -> tuple[float, float]:
    """Returns the tokens per second of concurrent streams, prompts included, and the engine's CPU seconds."""
    cpu, began = system.cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(streams.complete(client, _new_prompt(), tokens) for _ in range(count)))
    seconds = time.perf_counter() - began
    return count * (_PROMPT_TOKENS + tokens) / seconds, system.cpu_seconds(pid) - cpu


async def measure(model: Path, count: int, tokens: int, pairs: int, worker_flags: list[str]) -> None:
    common = ("--context-length", "1024", "--threads", "2", *worker_flags)
    async with (
        system.running(model, *common, "--host-cache-policy", "write-back") as without,
        system.running(model, *common, "--host-cache-policy", "write-through") as with_copies,
    ):
        sides = [(client, (await system.card(client)).pids.engine) for client in (without, with_copies)]
        for client, pid in sides:
            await of_new_streams(client, pid, count, tokens)
        speeds, cpu = [], []
        for number in range(pairs):
            (plain, plain_cpu), (copied, copied_cpu) = [
                await of_new_streams(client, pid, count, tokens) for client, pid in sides
            ]
            speeds.append((plain, copied))
            cpu.append(copied_cpu / plain_cpu)
            print(f"  pair {number + 1}: {plain:.1f}, {copied:.1f} tokens/s; CPU time {cpu[-1]:.3f}", flush=True)
    print(f"{model.name}, {count} streams of {_PROMPT_TOKENS} + {tokens} tokens, {pairs} pairs")
    print(f"  when they leave      {statistics.median(plain for plain, _ in speeds):6.1f} tokens/s")
    print(f"  when they are whole  {statistics.median(copied for _, copied in speeds):6.1f} tokens/s")
    print(f"  speed      {quartiles([copied / plain for plain, copied in speeds])}")
    print(f"  CPU time   {quartiles(cpu)}")


def main() -> None:
    parser = flags.model_parser(__doc__, streams=8, tokens=64, pairs=7)
    options, worker_flags = parser.parse_known_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.streams, options.tokens, options.pairs, worker_flags))


if __name__ == "__main__":
    main()
