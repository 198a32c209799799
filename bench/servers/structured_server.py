"""Compares the decoding speed of outputs that follow a JSON schema with that of llama-server, same file and schema.

Run: LLAMA_CPP_BIN=... .venv/bin/python -m bench.servers.structured_server [--model FILE.gguf] [--streams 8]
[--tokens 48] [--threads 1] [--pairs 7]

llama-server samples a token first, and applies the grammar to the whole vocabulary only if that token is not allowed.
Random weights (the 0.5B shape without --model, with 151,936 tokens) sample nearly uniformly: inside a string almost
every token is allowed, inside an array of integers hardly any. A form whose keys are most of the text is forced here,
token by token; llama-server samples it. The schemas take turns on both sides, in interleaved pairs. The time runs from
the requests to the last tokens; each side has compiled the schemas before."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from bench import flags, system
from bench.baselines import bare_llama, llama_server
from bench.models import benchmark_model
from bench.paired import quartiles
from bench.serving.structured import FORM
from tokenbus.client import Client
from tokenbus.protocol.wire import messages

_CONTEXT = 8_192
_INTEGERS = {"type": "array", "items": {"type": "integer"}, "minItems": 200, "maxItems": 200}
_KINDS: dict[str, Mapping[str, Any] | None] = {
    "free": None,
    "a string": {"type": "string"},
    "200 integers": _INTEGERS,
    "mostly keys": FORM,
}
_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
Tokens = AsyncIterator[int]
"""The numbers of tokens that arrive together."""


async def of_tokenbus(client: Client, schema: Mapping[str, Any] | None, number: int, tokens: int) -> Tokens:
    wanted = None
    if schema is not None:
        wanted = messages.ResponseFormat(type="json_schema", json_schema=messages.JsonSchema(schema=dict(schema)))
    request = messages.GenerateRequest(
        token_ids=[30 + number, *bare_llama.PROMPT],
        max_tokens=tokens,
        seed=number,
        ignore_eos=True if schema is None else None,
        response_format=wanted,
        **_SAMPLING,
    )
    async for chunk in client.generate("m", request):
        if chunk.error:
            raise SystemExit(f"the system refused: {chunk.error.message}")
        if chunk.tokens:
            yield chunk.tokens


async def of_llama_server(
    server: llama_server.LlamaServer, schema: Mapping[str, Any] | None, number: int, tokens: int
) -> Tokens:
    body: dict[str, Any] = {
        "prompt": [30 + number, *bare_llama.PROMPT],
        "n_predict": tokens,
        "seed": number,
        "ignore_eos": schema is None,
        "stream": True,
        **_SAMPLING,
    }
    if schema is not None:
        body["json_schema"] = schema
    async for event in server.events("/completion", body):
        if event.get("tokens"):
            yield len(event["tokens"])
        if "error" in event:
            raise SystemExit(f"llama-server refused: {event['error']}")


async def speed(stream: Callable[[int], Tokens], streams: int) -> float:
    """Returns tokens per second of all streams together, from their requests to their last tokens."""

    async def read(number: int) -> int:
        return sum([count async for count in stream(number)])

    began = time.perf_counter()
    counts = await asyncio.gather(*(read(number) for number in range(streams)))
    return sum(counts) / (time.perf_counter() - began)


async def measure(model: Path, streams: int, tokens: int, threads: int, pairs: int) -> None:
    ours = ("--threads", str(threads), "--kv-tokens", str(_CONTEXT), "--context-length", "1024", "--max-num-seqs", "16")
    flags = ("-np", str(streams), "-c", str(_CONTEXT))
    seen: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    async with system.running(model, *ours) as client, llama_server.running(model, threads, *flags) as server:
        for turn in range(pairs + 1):  # the first one compiles and warms up, and is not counted
            for kind, schema in _KINDS.items():
                theirs = await speed(lambda n, s=schema: of_llama_server(server, s, n, tokens), streams)  # type: ignore[misc]
                mine = await speed(lambda n, s=schema: of_tokenbus(client, s, n, tokens), streams)  # type: ignore[misc]
                if turn:
                    seen[kind].append((mine, theirs))
    print(f"{model.name}, {streams} streams of {tokens} tokens, {threads} threads, {pairs} interleaved pairs")
    for kind, speeds in seen.items():
        mine, theirs = (statistics.median(column) for column in zip(*speeds, strict=True))
        ratio = quartiles([one / other for one, other in speeds])
        print(f"  {kind:14s} tokenbus {mine:8.1f}, llama-server {theirs:8.1f} tokens/s: {ratio}")


def main() -> None:
    parser = flags.model_parser(__doc__, streams=8, tokens=48, threads=1, pairs=7)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.streams, options.tokens, options.threads, options.pairs))


if __name__ == "__main__":
    main()
