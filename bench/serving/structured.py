"""Compares the decoding speed of outputs that follow a JSON schema with that of free ones.

Run: .venv/bin/python -m bench.serving.structured [--model FILE.gguf] [--streams 1] [--tokens 128] [--threads 1]
[--pairs 9]

Three kinds of requests take turns: unconstrained ones, a schema with one long string, where nearly every token is
sampled under a mask, and a schema whose keys, which are forced, are most of the text. The time runs from the second
step of all streams, when the keys before the first value are computed, to the last. Without --model, a random 0.5B
model in Q8_0 is made."""

import asyncio
import statistics
import time
from pathlib import Path

from bench import flags, system
from bench.baselines import bare_llama
from bench.models import benchmark_model
from bench.paired import quartiles
from tokenbus.client import Client
from tokenbus.protocol.wire import messages

CONTEXT = 4_096
_TEXT: dict[str, object] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 100_000}},
    "required": ["text"],
}
_KEYS = [f"the number of the measurement that was taken at place {place}" for place in range(100)]
FORM: dict[str, object] = {
    "type": "object",
    "properties": {key: {"type": "boolean"} for key in _KEYS},
    "required": _KEYS,
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, object] | None] = {"free": None, "a long string": _TEXT, "mostly keys": FORM}


async def tokens_per_s(client: Client, schema: dict[str, object] | None, streams: int, tokens: int) -> float:
    """Returns the speed of all streams together, from each one's second step until each has its last token."""
    everyone = asyncio.Barrier(streams)
    starts: list[float] = []
    decoded: list[int] = []

    async def read(number: int) -> None:
        wanted = None
        if schema is not None:
            wanted = messages.ResponseFormat(type="json_schema", json_schema=messages.JsonSchema(schema=schema))
        request = messages.GenerateRequest(
            token_ids=bare_llama.PROMPT,
            max_tokens=tokens,
            temperature=1.0,
            seed=number,
            ignore_eos=schema is None,
            response_format=wanted,
        )
        counts: list[int] = []
        async for chunk in client.generate("m", request):
            if chunk.error:
                raise SystemExit(f"the system refused: {chunk.error.message}")
            if not chunk.tokens:
                continue
            counts.append(chunk.tokens)
            if len(counts) == 2:  # the tokens forced with the first one are computed
                await everyone.wait()
                starts.append(time.perf_counter())
        assert sum(counts) == tokens, (counts, tokens)
        decoded.append(sum(counts[2:]))

    await asyncio.gather(*(read(number) for number in range(streams)))
    return sum(decoded) / (time.perf_counter() - max(starts))


async def measure(model: Path, streams: int, tokens: int, threads: int, pairs: int) -> None:
    settings = ("--threads", str(threads), "--kv-tokens", str(CONTEXT), "--max-num-seqs", "64")
    seen: dict[str, list[float]] = {name: [] for name in KINDS}
    async with system.running(model, *settings, "--context-length", "1024") as client:
        for schema in KINDS.values():
            await tokens_per_s(client, schema, streams, 8 if schema is None else 80)
        for _ in range(pairs):
            for name, schema in KINDS.items():
                seen[name].append(await tokens_per_s(client, schema, streams, tokens))
    print(f"{model.name}, {streams} streams of {tokens} tokens, {threads} threads, {pairs} interleaved rounds")
    for name, speeds in seen.items():
        shares = [speed / free for speed, free in zip(speeds, seen["free"], strict=True)]
        print(f"  {name:14s} {statistics.median(speeds):8.1f} tokens/s, compared with free: {quartiles(shares)}")


def main() -> None:
    parser = flags.model_parser(__doc__, streams=1, threads=1, pairs=9)
    parser.add_argument("--tokens", type=int, default=128, help="above 70: each of the first steps may bring 33")
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.streams, options.tokens, options.threads, options.pairs))


if __name__ == "__main__":
    main()
