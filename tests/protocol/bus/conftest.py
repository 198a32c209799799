"""A broker of its own for every test, and connections to it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.protocol.bus.harness import Connect, Server
from tokenbus.protocol.bus.connection import BusSettings, Connection, connect


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "nats-server.log")
    await server.start()
    yield server
    server.kill()


@pytest.fixture
async def connected(server: Server) -> AsyncIterator[Connect]:
    """Makes connections to the server, and closes them."""
    made: list[Connection] = []

    async def make(**changes: object) -> Connection:
        assert server.running is not None
        settings = BusSettings(**({"url": server.running.url} | changes))  # type: ignore[arg-type]
        made.append(await connect(settings, f"test-{len(made)}"))
        return made[-1]

    yield make
    for connection in made:
        await connection.close()
