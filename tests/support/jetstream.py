"""A broker with JetStream, for tests of what is stored in it."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from tokenbus.cli.console import nats_server


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
