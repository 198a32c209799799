"""A broker with JetStream, for tests of what is stored in it: a pytest plugin, used by `tests/conftest.py`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tokenbus.cli.console import nats_server
from tokenbus.protocol.bus import connection as nats


def jetstream_config(folder: Path) -> Path:
    """Writes the configuration of one that stores in a folder."""
    config = folder / "jetstream.conf"
    config.write_text(f"jetstream {{ store_dir: '{folder}' }}\nmax_payload: 1MB\n")
    return config


@contextlib.contextmanager
def jetstream_broker(folder: Path) -> Iterator[nats_server.NatsServer]:
    """Runs one on a free port during the block."""
    running = asyncio.run(nats_server.start(0, folder / "nats.log", jetstream_config(folder)))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def jetstream_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nats_server.NatsServer]:
    """The broker of a module's tests."""
    with jetstream_broker(tmp_path_factory.mktemp("jetstream")) as running:
        yield running


@pytest.fixture
async def jetstream(jetstream_server: nats_server.NatsServer) -> AsyncIterator[nats.Connection]:
    """A connection to that broker."""
    opened = await nats.connect(nats.BusSettings(url=jetstream_server.url), "test")
    yield opened
    await opened.close()
