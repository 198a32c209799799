"""llama.cpp's own server, built from the sources inside llama-cpp-python's source distribution.

`python -m bench.baselines.llama_server build FOLDER` builds llama-server, llama-bench and llama-batched-bench with
cmake, which takes about 10 minutes on 2 cores. Benchmarks find them through the variable LLAMA_CPP_BIN=FOLDER/bin."""

import argparse
import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from bench import http_client, system

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

    def __init__(self, url: str) -> None:
        self._url = url
        self.base_url = f"{url}/v1"
        """Base URL of its OpenAI API."""

    async def complete(
        self, token_ids: Sequence[int], max_tokens: int, on_token: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Returns when each token of a greedy completion arrived, by `time.perf_counter`."""
        body = {"prompt": list(token_ids), "n_predict": max_tokens, "temperature": 0, "ignore_eos": True}
        times = []
        async for event in self.events(body):
            if event.get("tokens"):
                times.append(time.perf_counter())
                on_token()
        return times

    def events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yields the events of a completion."""
        return http_client.events(f"{self._url}/completion", body | {"stream": True})


@contextlib.asynccontextmanager
async def running(model: Path, threads: int, *flags: str) -> AsyncIterator[LlamaServer]:
    """Runs llama-server with `model`; `flags` are further arguments."""
    command = [str(binary("llama-server")), "-m", str(model), "-t", str(threads), "-tb", str(threads), *flags]
    with system.other_server(lambda port: [*command, "--host", "127.0.0.1", "--port", str(port)]) as port:
        url = f"http://127.0.0.1:{port}"
        await http_client.until_answered(f"{url}/health")
        yield LlamaServer(url)


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
