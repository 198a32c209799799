"""Compares the throughput of eight clients with that of llama-cpp-python's own server.

Run: .venv/bin/python -m bench.servers.python_server [--model FILE.gguf] [--clients 8] [--tokens 64] [--pairs 7]

The other side is `python -m llama_cpp.server` on the same build of llama.cpp (pip install 'tokenbus[compare]'), in
interleaved pairs. Throughput is all tokens over the time from the first request to the last answer."""

import asyncio
import contextlib
import importlib.util
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from bench import benchmark_model, flags, http_client, streams, system
from bench.paired import interleave, show
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import messages

_CONTEXT = 1_024
_STORY = " ".join(f"the {word} went home" for word in ("fox", "owl", "king", "cat", "sea", "wind", "boy", "hen"))
Ask = Callable[[str, int], Awaitable[int]]
"""Completes a prompt with at most this many tokens; returns how many there were."""


@contextlib.asynccontextmanager
async def python_server(model: Path, threads: int) -> AsyncIterator[Ask]:
    """Runs llama_cpp.server so that new requests don't interrupt running ones."""
    if importlib.util.find_spec("fastapi") is None:
        sys.exit("llama_cpp.server is needed: pip install 'tokenbus[compare]'")
    sizes = ["--n_ctx", str(_CONTEXT), "--n_threads", str(threads), "--n_threads_batch", str(threads)]
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(model), *sizes, "--interrupt_requests", "false"]
    with system.other_server(lambda port: [*command, "--port", str(port)]) as port:
        url = f"http://localhost:{port}/v1"
        await http_client.until_answered(f"{url}/models")

        async def ask(prompt: str, tokens: int) -> int:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
            return int((await http_client.ask(f"{url}/completions", body))["usage"]["completion_tokens"])

        yield ask


async def ask_tokenbus(client: WireClient, prompt: str, tokens: int) -> int:
    request = messages.GenerateRequest(prompt=prompt, max_tokens=tokens, temperature=0)
    terminal = [chunk async for chunk in streams.chunks(client, request)][-1]
    assert terminal.usage, terminal
    return terminal.usage.completion_tokens


async def throughput(ask: Ask, clients: int, tokens: int, number: int) -> float:
    """Returns tokens per second."""
    began = time.perf_counter()
    counts = await asyncio.gather(*(ask(f"{number} {one} {_STORY}", tokens) for one in range(clients)))
    return sum(counts) / (time.perf_counter() - began)


async def measure(model: Path, clients: int, tokens: int, pairs: int, threads: int) -> None:
    ours = ("--threads", str(threads), "--kv-tokens", str(clients * _CONTEXT), "--context-length", str(_CONTEXT))
    async with python_server(model, threads) as ask, system.running(model, *ours) as client:
        seen = await interleave(
            lambda number: throughput(ask, clients, tokens, number),
            lambda number: throughput(lambda *one: ask_tokenbus(client, *one), clients, tokens, number),
            pairs,
        )
    print(f"{model.name}, {clients} clients, {tokens} tokens each, {threads} threads, {pairs} pairs after one")
    show(("llama_cpp.server", "tokenbus"), "tokens/s", seen)


def main() -> None:
    parser = flags.model_parser(__doc__, clients=8, tokens=64, pairs=7, threads=1)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.clients, options.tokens, options.pairs, options.threads))


if __name__ == "__main__":
    main()
