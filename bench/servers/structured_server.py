"""Compares the decoding speed of outputs that follow a JSON schema with that of llama-server, same file and schema.

Run: LLAMA_CPP_BIN=... .venv/bin/python -m bench.servers.structured_server [--model FILE.gguf] [--streams 8]
[--tokens 48] [--threads 1] [--pairs 7]

llama-server samples a token first, and applies the grammar to the whole vocabulary only if that token is not allowed.
Random weights (the 0.5B shape without --model, with 151,936 tokens) sample nearly uniformly: inside a string almost
every token is allowed, inside an array of integers hardly any. A form whose keys are most of the text is forced here,
token by token; llama-server samples it. The schemas take turns on both sides, in interleaved pairs. The time runs from
the requests to the last tokens; each side has compiled the schemas before."""

import argparse
import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from bench import benchmark_model, flags, streams, system
from bench.baselines import llama_server
from bench.paired import interleave, show
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import messages

_CONTEXT = 8_192
_PROMPT = list(range(10, 26))
_KEYS = [f"the number of the measurement that was taken at place {place}" for place in range(100)]
_KINDS: dict[str, dict[str, Any] | None] = {
    "free": None,
    "a string": {"type": "string"},
    "200 integers": {"type": "array", "items": {"type": "integer"}, "minItems": 200, "maxItems": 200},
    "mostly keys": {
        "type": "object",
        "properties": {key: {"type": "boolean"} for key in _KEYS},
        "required": _KEYS,
        "additionalProperties": False,
    },
}
_SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
Tokens = AsyncIterator[int]
"""The numbers of tokens that arrive together."""


async def of_tokenbus(client: WireClient, tokens: int, schema: dict[str, Any] | None, number: int) -> Tokens:
    wanted = None
    if schema is not None:
        wanted = messages.ResponseFormat(type="json_schema", json_schema=messages.JsonSchema(schema=schema))
    request = messages.GenerateRequest(
        token_ids=[30 + number, *_PROMPT],
        max_tokens=tokens,
        seed=number,
        ignore_eos=True if schema is None else None,
        response_format=wanted,
        **_SAMPLING,
    )
    async for chunk in streams.chunks(client, request):
        yield chunk.tokens


async def of_llama_server(
    server: llama_server.LlamaServer, tokens: int, schema: dict[str, Any] | None, number: int
) -> Tokens:
    body = {"prompt": [30 + number, *_PROMPT], "n_predict": tokens, "seed": number, "ignore_eos": schema is None}
    form = {} if schema is None else {"json_schema": schema}
    async for event in server.events({**body, **_SAMPLING, **form}):
        if "error" in event:
            raise SystemExit(f"llama-server refused: {event['error']}")
        yield len(event.get("tokens") or ())


async def speeds(stream: Callable[[dict[str, Any] | None, int], Tokens], num_streams: int) -> tuple[float, ...]:
    """Returns, for each schema, tokens per second of all streams together, from their requests to their last tokens."""

    async def read(schema: dict[str, Any] | None, number: int) -> int:
        return sum([count async for count in stream(schema, number)])

    found = []
    for schema in _KINDS.values():
        began = time.perf_counter()
        counts = await asyncio.gather(*(read(schema, number) for number in range(num_streams)))
        found.append(sum(counts) / (time.perf_counter() - began))
    return tuple(found)


async def measure(model: Path, options: argparse.Namespace) -> None:
    count, tokens, threads = options.streams, options.tokens, options.threads
    ours = ("--threads", str(threads), "--kv-tokens", str(_CONTEXT), "--context-length", "1024", "--max-num-seqs", "16")
    slots = ("-np", str(count), "-c", str(_CONTEXT))
    async with system.running(model, *ours) as client, llama_server.running(model, threads, *slots) as server:
        seen = await interleave(
            lambda _: speeds(functools.partial(of_llama_server, server, tokens), count),
            lambda _: speeds(functools.partial(of_tokenbus, client, tokens), count),
            options.pairs,
        )
    print(f"{model.name}, {count} streams of {tokens} tokens, {threads} threads, {options.pairs} interleaved pairs")
    for place, kind in enumerate(_KINDS):
        print(f" {kind}")
        show(("llama-server", "tokenbus"), "tokens/s", [(other[place], own[place]) for other, own in seen])


def main() -> None:
    parser = flags.model_parser(__doc__, streams=8, tokens=48, threads=1, pairs=7)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options))


if __name__ == "__main__":
    main()
