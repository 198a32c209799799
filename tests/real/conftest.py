"""Tests with real weights, which `make test-real` runs and `make test` does not."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.real import derive
from tests.real.reference import CONTEXT, Reference
from tests.support.system import System, up_with_output

if "TOKENBUS_REAL" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
elif not derive.is_complete():
    pytest.exit("real weights are not here: run make models", returncode=1)

MODEL = "smollm2"


class Api:
    """The HTTP API of a system, as any client sees it."""

    def __init__(self, base_url: str) -> None:
        self._client = httpx2.Client(base_url=base_url, timeout=300)

    def post(self, path: str, **body: Any) -> Any:
        reply = self._client.post(path, json={"model": MODEL} | body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def chat(self, question: str, **fields: Any) -> Any:
        """Returns an answer's first choice, with the prompt's token ids in `prompt_token_ids`."""
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 48, "return_token_ids": True} | fields
        answer = self.post("/chat/completions", **body)
        return answer["choices"][0] | {name: answer.get(name) for name in ("prompt_token_ids", "usage")}

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    found = Reference(derive.SMOLLM2.folder / derive.SMOLLM2.weights)
    yield found
    found.close()


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Api]:
    """Runs a system of one worker, which computes as the reference does."""
    flags = ("--workers", "1", "--threads", "1", "--context-length", str(CONTEXT), "--gateway-port", "0")
    with up_with_output("--model", MODEL, *flags, *arguments) as said:
        found = Api(said["http"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as found:
        yield found


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    found = await System.start(tmp_path)
    yield found
    await found.stop()
