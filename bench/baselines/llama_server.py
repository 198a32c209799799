"""llama.cpp's own server, built from the sources inside llama-cpp-python's source distribution.

`python -m bench.baselines.llama_server build FOLDER` builds llama-server, llama-bench and llama-batched-bench with
cmake, which takes about 10 minutes on 2 cores. Benchmarks find them through the variable LLAMA_CPP_BIN=FOLDER/bin."""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tokenbus.protocol.process.parent import end_with_parent

_TARGETS = ("llama-server", "llama-bench", "llama-batched-bench")
_FLAGS = (
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)


def binary(name: str) -> Path:
    """Returns the path of one of the programs. Raises SystemExit saying how to build it."""
    folder = os.environ.get("LLAMA_CPP_BIN", "")
    path = Path(folder) / name
    if not folder or not path.is_file():
        sys.exit(
            f"{name} is missing: run python -m bench.baselines.llama_server build DIR and set LLAMA_CPP_BIN=DIR/bin"
        )
    return path


class LlamaServer:
    """A running llama-server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.base_url = f"http://127.0.0.1:{port}/v1"
        """Base URL of its OpenAI API."""

    async def complete(self, token_ids: Sequence[int], max_tokens: int) -> list[float]:
        """Returns when each token of a greedy completion arrived, by `time.perf_counter`."""
        body = {
            "prompt": list(token_ids),
            "n_predict": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        return [time.perf_counter() async for event in self.events("/completion", body) if event.get("tokens")]

    async def events(self, path: str, body: object) -> AsyncIterator[dict[str, Any]]:
        """Yields the data of the events with which a request is answered."""
        async for line in self._lines("POST", path, body):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])

    async def until_ready(self) -> None:
        async with asyncio.timeout(300):
            while True:
                with contextlib.suppress(OSError):
                    if b'{"status":"ok"}' in [line async for line in self._lines("GET", "/health")]:
                        return
                await asyncio.sleep(0.2)

    async def _lines(self, method: str, path: str, body: object = None) -> AsyncIterator[bytes]:
        """Yields the lines of a response's body as they arrive. HTTP 1.0 avoids chunked encoding."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        try:
            data = b"" if body is None else json.dumps(body).encode()
            head = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            while line := await reader.readline():
                yield line.strip()
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def running(model: Path, threads: int, *flags: str) -> AsyncIterator[LlamaServer]:
    """Runs llama-server with `model`; `flags` are further arguments."""
    with socket.socket() as free, tempfile.TemporaryFile() as log:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [str(binary("llama-server")), "-m", str(model), "-t", str(threads), "-tb", str(threads)]
        process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
            [*command, "--host", "127.0.0.1", "--port", str(port), *flags],
            stdout=log,
            stderr=log,
            preexec_fn=end_with_parent,
        )
        try:
            server = LlamaServer(port)
            await server.until_ready()
            yield server
        finally:
            process.kill()
            process.wait()


def build(folder: Path) -> None:
    """Builds the programs in `folder`, from the source distribution of the installed llama-cpp-python."""
    import llama_cpp

    with tempfile.TemporaryDirectory() as source:
        wanted = f"llama-cpp-python=={llama_cpp.__version__}"
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", wanted]
        subprocess.run([*download, "-d", source], check=True)
        with tarfile.open(next(Path(source).glob("*.tar.gz"))) as archive:
            archive.extractall(source, filter="data")
        tree = next(Path(source).glob("*/vendor/llama.cpp"))
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cmake", "-S", tree, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *_FLAGS], check=True)
        subprocess.run(["cmake", "--build", folder, "-j", "--target", *_TARGETS], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["build"])
    parser.add_argument("folder", type=Path)
    build(parser.parse_args().folder.absolute())


if __name__ == "__main__":
    main()
