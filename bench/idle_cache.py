"""How much slower do streams decode when the cache is full of what nobody uses now?

Run: .venv/bin/python -m bench.idle_cache [--model FILE.gguf] [--streams 4] [--pairs 7] [-- worker flags]

Two workers, of which one at a time has something to do: one keeps nothing (--max-cached-blocks 0, no host memory), the
other has been given prompts of 500 tokens until its KV memory would be full of them. In interleaved pairs."""

import argparse
import asyncio
import itertools
import statistics
from pathlib import Path

from bench import models, streams, system
from bench.decode import ratio_of
from bench.decode_server import of_streams
from tokenbus.client import Client

_PROMPT_TOKENS = 500
_serials = itertools.count()


async def fill(client: Client, kv_tokens: int) -> None:
    for _ in range(kv_tokens // _PROMPT_TOKENS + 1):
        serial = next(_serials)
        prompt = [10 + (serial * 7 + place * place) % (models.VOCABULARY - 10) for place in range(_PROMPT_TOKENS)]
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
    print(f"  speed, full / empty   {ratio_of([full / empty for empty, full in seen])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--kv-tokens", type=int, default=8_192)
    options, flags = parser.parse_known_args()
    with models.model(options.model) as model:
        asyncio.run(measure(model, options.streams, options.tokens, options.pairs, options.kv_tokens, flags))


if __name__ == "__main__":
    main()
