"""Compares eight clients of the gateway's chat completions, as events, with eight of llama-server's.

Run: LLAMA_CPP_BIN=... .venv/bin/python -m bench.gateway.against_llama_server [--model FILE.gguf] [--pairs 7]
[--threads 1] [--prefix 1000]

Same file, same bodies, equal threads, in interleaved pairs. Two kinds of rounds: short prompts and --tokens tokens for
each client, measured in tokens per second of all clients; and prompts with one prefix of about --prefix tokens, new in
each round, measured by the median time to the first token. Without --model, a random 0.5B model is made."""

import asyncio
import functools
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench import benchmark_model, flags, http_client, system
from bench.baselines import llama_server
from bench.paired import interleave, show

_CLIENTS = 8
_WORDS = ("the", "fox", "went", "over", "a", "hill", "and", "saw", "some", "blue", "birds", "sing", "at", "night")
_TOKENS_PER_WORD = 2.6
"""With the vocabulary of the random model, whose merges are few."""


def body(text: str, tokens: int, seed: int, system_text: str = "") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    if system_text:
        messages.insert(0, {"role": "system", "content": system_text})
    return {
        "model": "m",
        "messages": messages,
        "max_tokens": tokens,
        "seed": seed,
        "ignore_eos": True,
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
    }


async def throughput(url: str, tokens: int) -> float:
    """Returns the tokens per second of all clients together."""
    began = time.perf_counter()
    asked = [body(f"Client {number} wants a story.", tokens, number) for number in range(_CLIENTS)]
    replies = await asyncio.gather(*(http_client.complete(url, one) for one in asked))
    generated = sum(int(reply.usage["completion_tokens"]) for reply in replies)
    assert generated == tokens * _CLIENTS, generated
    return generated / (time.perf_counter() - began)


async def first_token(url: str, prefix: str) -> float:
    """Returns the median time to the first piece of text, of all clients at once, in seconds."""
    asked = [body(f"Client {number} wants a story.", 4, number, prefix) for number in range(_CLIENTS)]
    replies = await asyncio.gather(*(http_client.complete(url, one) for one in asked))
    return statistics.median(reply.times[0] - reply.began for reply in replies)


class Seen(NamedTuple):
    tokens_per_s: float
    first_s: float


async def one_round(url: str, tokens: int, prefix: int, number: int) -> Seen:
    rng = random.Random(number)
    common = " ".join(rng.choice(_WORDS) for _ in range(int(prefix / _TOKENS_PER_WORD)))
    return Seen(await throughput(url, tokens), await first_token(url, common))


async def measure(model: Path, pairs: int, threads: int, tokens: int, prefix: int) -> None:
    context = _CLIENTS * (prefix * 2 + 256)
    ours = ("--threads", str(threads), "--kv-tokens", str(context), "--context-length", str(context // _CLIENTS))
    async with (
        system.started(model, ours) as running,
        system.gateway(running) as (url, _),
        llama_server.running(model, threads, "--jinja", "-np", str(_CLIENTS), "-c", str(context)) as server,
    ):
        seen = await interleave(
            functools.partial(one_round, server.base_url, tokens, prefix),
            functools.partial(one_round, url, tokens, prefix),
            pairs,
        )
    print(f"{model.name}, {_CLIENTS} clients, {threads} threads, {pairs} interleaved pairs")
    for place, unit in enumerate((f"tokens/s, {tokens} each", f"s to the first token, {prefix} shared")):
        show(("llama-server", "tokenbus"), unit, [(other[place], own[place]) for other, own in seen], decimals=2)


def main() -> None:
    parser = flags.model_parser(__doc__, pairs=7, threads=1, tokens=48, prefix=1_000)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.pairs, options.threads, options.tokens, options.prefix))


if __name__ == "__main__":
    main()
