"""Measures how much a cache full of unused prefixes slows down decoding.

Run: .venv/bin/python -m bench.serving.kv.idle_cache [--model FILE.gguf] [--streams 4] [--pairs 7] [-- worker flags]

Two workers take turns: one caches nothing (--max-cached-blocks 0, no host memory), the other has computed prompts of
500 tokens until its KV cache is full."""

import asyncio
import itertools
import statistics
from pathlib import Path

from bench import flags, streams, system
from bench.models import benchmark_model
from bench.paired import quartiles
from bench.servers.decode_server import of_streams
from tokenbus.client import Client

_PROMPT_TOKENS = 500
_serials = itertools.count()


async def fill(client: Client, kv_tokens: int) -> None:
    for _ in range(kv_tokens // _PROMPT_TOKENS + 1):
        prompt = benchmark_model.prompt(next(_serials), _PROMPT_TOKENS)
        await streams.complete(client, prompt, 1)


async def measure(model: Path, count: int, tokens: int, pairs: int, kv_tokens: int, flags: list[str]) -> None:
    common = ("--threads", "2", "--kv-tokens", str(kv_tokens), "--context-length", "1024")
    async with (
        system.running(model, *common, "--max-cached-blocks", "0", "--host-cache-mib", "0") as empty_client,
        system.running(model, *common, *flags) as full_client,
    ):

        async def speed(client: Client) -> float:
            return await of_streams(lambda prompt, most: streams.complete(client, prompt, most), count, tokens)

        await fill(full_client, kv_tokens)
        seen = []
        for number in range(pairs):
            seen.append((await speed(empty_client), await speed(full_client)))
            load = (await system.card(full_client)).load
            print(f"  round {number + 1}: {seen[-1][0]:.1f}, {seen[-1][1]:.1f} tokens/s with {load}", flush=True)
    print(f"{model.name}, {count} streams of {tokens} tokens, {kv_tokens} tokens of KV memory, {pairs} pairs")
    print(f"  empty cache   {statistics.median(empty for empty, _ in seen):6.1f} tokens/s")
    print(f"  full cache    {statistics.median(full for _, full in seen):6.1f} tokens/s")
    print(f"  speed, full / empty   {quartiles([full / empty for empty, full in seen])}")


def main() -> None:
    parser = flags.model_parser(__doc__, streams=4, tokens=48, pairs=7, kv_tokens=8_192)
    options, worker_flags = parser.parse_known_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.streams, options.tokens, options.pairs, options.kv_tokens, worker_flags))


if __name__ == "__main__":
    main()
