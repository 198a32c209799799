"""A running system for the suites: the demo model, the scripted model, and a gateway with the names that suites use."""

import contextlib
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import scripted_model
from tests.support.system import Gateway, running_gateway, running_up, running_worker
from tests.third_party import script

SCRIPTED = "scripted"
ALIASES = (
    "gpt-6-astra",
    "gpt-3.5-turbo-instruct",
    "text-embedding-3-small",
    "model",
    "claude-opus-5-5",
)
"""The names under which suites ask for models; the demo model answers to all."""
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
    aliases = [flag for name in ALIASES for flag in ("--alias", f"{name}=demo")]
    with contextlib.ExitStack() as stack:
        nats = stack.enter_context(running_up("--workers", "1", "--threads", "1"))
        stack.enter_context(running_worker(nats, "--model", str(model), "--served-name", SCRIPTED, "--threads", "1"))
        gateway = stack.enter_context(running_gateway(nats, folder, *aliases))
        _wait_for(f"{gateway.url}/models/{SCRIPTED}")
        yield Served(nats, gateway.url, gateway)


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url):
            return
        time.sleep(0.1)
    raise TimeoutError(url)
