"""A running system for the suites: the demo model, the scripted model, random encoders that make embeddings and rank
documents, and a gateway with the names that suites use."""

import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import scripted_model
from tests.support.models import random_encoder
from tests.support.models.random_encoder import EncoderShape
from tests.support.system import Gateway, running_gateway, running_up, running_worker
from tests.third_party import script

SCRIPTED = "scripted"
EMBEDDER, RERANKER = "embedder", "reranker"
_RETIRED = (
    "claude-1.3",
    "claude-1.3-100k",
    "claude-instant-1.1",
    "claude-instant-1.1-100k",
    "claude-instant-1.2",
    "claude-2.0",
    "claude-2.1",
    "claude-3-sonnet-20240229",
    "claude-3-opus-20240229",
    "claude-3-5-haiku-latest",
    "claude-3-5-haiku-20241022",
    "claude-3-7-sonnet-latest",
    "claude-3-7-sonnet-20250219",
    "claude-opus-4-0",
    "claude-opus-4-20250514",
    "claude-sonnet-4-0",
    "claude-sonnet-4-20250514",
    "claude-mythos-preview",
    "claude-sonnet-4-5",
    "claude-sonnet-4-5-20250929",
)
"""The models of which Anthropic's library says that they retire: its tests ask for each of them."""
ALIASES = {
    "gpt-6-astra": "demo",
    "gpt-3.5-turbo-instruct": "demo",
    "text-embedding-3-small": EMBEDDER,
    "model": "demo",
    "claude-opus-5-5": SCRIPTED,
    **dict.fromkeys(_RETIRED, SCRIPTED),
}
"""The names under which suites ask for models."""
_CONTEXT = "65536"
"""The context of the scripted model, in tokens, of which Codex's prompt has 38,000: its own is cut where little memory
is free."""
_READY_TIMEOUT_S = 120.0


class Served(NamedTuple):
    """The addresses of a running system."""

    nats: str
    base_url: str
    """The `base_url` for OpenAI's clients."""
    gateway: Gateway

    @property
    def root_url(self) -> str:
        """The `base_url` for Anthropic's clients."""
        return self.base_url.removesuffix("/v1")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Runs the system; its files are in `folder`."""
    model = scripted_model.write(folder / SCRIPTED, script.lines())
    aliases = [flag for alias in ALIASES.items() for flag in ("--alias", "=".join(alias))]
    with contextlib.ExitStack() as stack:
        nats = stack.enter_context(running_up("--workers", "1", "--threads", "1"))
        scripted = ("--model", str(model), "--served-name", SCRIPTED, "--context-length", _CONTEXT)
        stack.enter_context(running_worker(nats, *scripted, "--threads", "1"))
        for name, pooling in ((EMBEDDER, "mean"), (RERANKER, "rank")):
            path = folder / f"{name}.gguf"
            random_encoder.write(path, EncoderShape("bert", pooling))
            stack.enter_context(running_worker(nats, "--model", str(path), "--served-name", name, "--threads", "1"))
        gateway = stack.enter_context(running_gateway(nats, folder, *aliases, "--default-model", "demo"))
        for name in (SCRIPTED, EMBEDDER, RERANKER):
            wait_for(f"{gateway.url}/models/{name}", 200)
        wait_for(f"{gateway.url}/models/nobody", 404)  # a young router does not know yet which models there are not
        yield Served(nats, gateway.url, gateway)


def wait_for(url: str, status: int) -> None:
    """Waits until a URL answers with a status. Raises TimeoutError."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while _status(url) != status:
        if time.monotonic() > deadline:
            raise TimeoutError(url)
        time.sleep(0.1)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
