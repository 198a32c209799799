"""Compares the throughput of eight clients with that of llama-cpp-python's own server.

Run: .venv/bin/python -m bench.servers.python_server [--model FILE.gguf] [--clients 8] [--tokens 64] [--pairs 7]

The other side is `python -m llama_cpp.server` on the same build of llama.cpp (pip install 'tokenbus[bench]'), in
interleaved pairs. Throughput is all tokens over the time from the first request to the last answer."""

import asyncio
import contextlib
import importlib.util
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench import flags, system
from bench.models import benchmark_model
from bench.paired import quartiles
from tokenbus.client import Client
from tokenbus.protocol.process.parent import end_with_parent
from tokenbus.protocol.wire import messages

_CONTEXT = 1_024
_STORY = " ".join(f"the {word} went home" for word in ("fox", "owl", "king", "cat", "sea", "wind", "boy", "hen"))


@contextlib.asynccontextmanager
async def running(model: Path, threads: int) -> AsyncIterator[int]:
    """Runs llama_cpp.server so that new requests don't interrupt running ones; yields its port."""
    if importlib.util.find_spec("fastapi") is None:
        sys.exit("llama_cpp.server is needed: pip install 'tokenbus[bench]'")
    with socket.socket() as free, tempfile.TemporaryFile() as log:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "llama_cpp.server", "--model", str(model), "--port", str(port)]
        sizes = ["--n_ctx", str(_CONTEXT), "--n_threads", str(threads), "--n_threads_batch", str(threads)]
        process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
            [*command, *sizes, "--interrupt_requests", "false"], stdout=log, stderr=log, preexec_fn=end_with_parent
        )
        try:
            async with asyncio.timeout(120):
                while not await _answers(port):  # noqa: ASYNC110 - nothing says when it serves
                    await asyncio.sleep(0.2)
            yield port
        finally:
            process.kill()
            process.wait()


async def _answers(port: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool((await _ask(port, "GET", "/v1/models"))["data"])
    return False


async def _ask(port: int, method: str, path: str, body: object = None) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
    finally:
        writer.close()


async def of_python_server(port: int, prompts: list[str], tokens: int) -> float:
    """Returns tokens per second."""
    fields = {"max_tokens": tokens, "temperature": 0}
    began = time.perf_counter()
    asked = [_ask(port, "POST", "/v1/completions", fields | {"prompt": prompt}) for prompt in prompts]
    answers = await asyncio.gather(*asked)
    tokens_made: int = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return tokens_made / (time.perf_counter() - began)


async def of_tokenbus(client: Client, prompts: list[str], tokens: int) -> float:
    """Returns tokens per second."""

    async def ask(prompt: str) -> int:
        request = messages.GenerateRequest(prompt=prompt, max_tokens=tokens, temperature=0)
        terminal = [chunk async for chunk in client.generate("m", request)][-1]
        assert terminal.usage, terminal
        return terminal.usage.completion_tokens

    began = time.perf_counter()
    counts = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    return sum(counts) / (time.perf_counter() - began)


async def measure(model: Path, clients: int, tokens: int, pairs: int, threads: int) -> None:
    ours = ("--threads", str(threads), "--kv-tokens", str(clients * _CONTEXT), "--context-length", str(_CONTEXT))
    seen = []
    async with running(model, threads) as port, system.running(model, *ours) as client:
        for number in range(pairs + 1):
            prompts = [f"{number} {one} {_STORY}" for one in range(clients)]
            pair = (await of_python_server(port, prompts, tokens), await of_tokenbus(client, prompts, tokens))
            print(f"  round {number}: {pair[0]:.1f}, {pair[1]:.1f} tokens/s", flush=True)
            seen.append(pair)
    seen = seen[1:]
    print(f"{model.name}, {clients} clients, {tokens} tokens each, {threads} threads, {pairs} pairs after one")
    print(f"  llama_cpp.server   {statistics.median(theirs for theirs, _ in seen):6.1f} tokens/s")
    print(f"  tokenbus           {statistics.median(mine for _, mine in seen):6.1f} tokens/s")
    print(f"  tokenbus / llama_cpp.server   {quartiles([mine / theirs for theirs, mine in seen])}")


def main() -> None:
    parser = flags.model_parser(__doc__, clients=8, tokens=64, pairs=7, threads=1)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(model, options.clients, options.tokens, options.pairs, options.threads))


if __name__ == "__main__":
    main()
