"""Several nats-servers on one machine: a cluster of equals, or a hub with a leaf node."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.ports import free_ports
from tokenbus.cli.console import nats_server

LAME_DUCK = 'lame_duck_grace_period: "3s"\nlame_duck_duration: "30s"\n'
"""After the first period a server closes the connections that are left, one by one over the second, which can't be
shorter."""
PINGS = 'ping_interval: "1s", ping_max: 2'
"""Between servers, as docs/operations.md advises: by default they notice only after minutes that one stands still."""


class Cluster:
    """Servers by name, each of which can be killed, frozen or told to send its clients away."""

    def __init__(self, folder: Path, *, keeps: bool = False) -> None:
        """With `keeps`, the servers have JetStream."""
        self._folder = folder
        self._keeps = keeps
        self._configs: dict[str, Path] = {}
        self._servers: dict[str, nats_server.NatsServer] = {}

    @classmethod
    async def start(cls, folder: Path, names: str = "abc", more: str = "") -> "Cluster":
        """Starts a server for each letter of `names` and waits until they know each other. `more` is added to their
        settings."""
        cluster = cls(folder)
        cluster.configure(names, more)
        try:
            for name in names:
                await cluster.add(name)
            await cluster.until_whole()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    def configure(self, names: str = "abc", more: str = "") -> None:
        """Writes the settings of a server for each letter, which can then be started."""
        ports = free_ports(len(names))
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
        for name, port in zip(names, ports, strict=True):
            routing = f"cluster {{ name: test, listen: 127.0.0.1:{port}, routes: [{routes}], {PINGS} }}\n"
            self._configure(name, routing + LAME_DUCK + more)

    async def add(self, name: str, port: int = 0) -> nats_server.NatsServer:
        """Starts a server that is configured; 0 is any free port."""
        await self._start(name, port)
        return self._servers[name]

    @classmethod
    async def start_leaf(cls, folder: Path) -> "Cluster":
        """Starts a server `hub`, and a server `leaf` that is a leaf node of it."""
        cluster = cls(folder)
        port = await cluster.add_hub()
        await cluster.add_leaf("leaf", port)
        return cluster

    async def add_hub(self) -> int:
        """Starts a server `hub`; returns the port to which leaf nodes connect."""
        (port,) = free_ports(1)
        await self._add("hub", f"leafnodes {{ listen: 127.0.0.1:{port}, no_advertise: true }}\n")
        return port

    async def add_leaf(self, name: str, port: int) -> None:
        """Starts a leaf node of the server that listens on that port, perhaps beyond a link."""
        remote = f'{{ url: "nats://127.0.0.1:{port}" }}'
        await self._add(name, f'leafnodes {{ remotes: [{remote}], reconnect: "1s" }}\n')
        async with asyncio.timeout(10):
            while "Leafnode connection created" not in (self._folder / f"nats-{name}.log").read_text():
                await asyncio.sleep(0.02)

    async def add_gateway(self, name: str, port: int, shown_port: int, others: Mapping[str, int]) -> None:
        """Starts a server that is a cluster of its own, in a supercluster: it listens for the others on `port`, which
        they know as `shown_port`, and connects to `others`, each a name with a port."""
        remotes = ", ".join(f'{{ name: {one}, urls: ["nats://127.0.0.1:{there}"] }}' for one, there in others.items())
        (routes,) = free_ports(1)
        gateway = f'listen: 127.0.0.1:{port}, advertise: "127.0.0.1:{shown_port}", connect_retries: 1000000'
        await self._add(
            name,
            f"cluster {{ name: {name}, listen: 127.0.0.1:{routes} }}\n"
            f"gateway {{ name: {name}, {gateway}, gateways: [{remotes}] }}\n",
        )

    def __getitem__(self, name: str) -> nats_server.NatsServer:
        return self._servers[name]

    async def restart(self, name: str, pause_s: float = 0.0) -> None:
        """Kills a server and starts it again on its port after a pause."""
        port = urlsplit(self._servers[name].url).port or 0
        self._servers[name].kill()
        await asyncio.sleep(pause_s)
        await self._start(name, port)

    async def until_joined(self, names: Sequence[str]) -> None:
        """Waits until the gateways of these servers know each other."""
        async with asyncio.timeout(20):
            for name in names:
                log = self._folder / f"nats-{name}.log"
                while log.read_text().count("utbound gateway connection to") < len(names) - 1:
                    await asyncio.sleep(0.05)

    async def until_whole(self) -> None:
        """Waits until every server knows every other one."""
        async with asyncio.timeout(10):
            for name in self._servers:
                while len((await self._info(name)).get("connect_urls", ())) < len(self._servers):
                    await asyncio.sleep(0.02)

    def send_away(self, name: str) -> None:
        """Puts a server into lame duck mode: it tells its clients to go, and ends when all have gone."""
        os.kill(self._servers[name].pid, signal.SIGUSR2)

    async def until_ended(self, name: str) -> None:
        async with asyncio.timeout(60):
            while self._servers[name].is_running:
                await asyncio.sleep(0.02)

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Freezes a server, which then accepts connections and answers nothing."""
        pid = self._servers[name].pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()

    async def _add(self, name: str, config: str) -> None:
        self._configure(name, config)
        await self._start(name, 0)

    def _configure(self, name: str, config: str) -> None:
        self._configs[name] = self._folder / f"nats-{name}.conf"
        self._configs[name].write_text(f"server_name: {name}\n{config}")

    async def _start(self, name: str, port: int) -> None:
        log_path, store = self._folder / f"nats-{name}.log", self._folder / f"store-{name}" if self._keeps else None
        self._servers[name] = await nats_server.start(port, log_path, self._configs[name], store)

    async def _info(self, name: str) -> dict[str, Any]:
        """Returns what a server says of itself and its cluster."""
        place = urlsplit(self._servers[name].url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        line = await reader.readline()
        writer.close()
        found: dict[str, Any] = json.loads(line.removeprefix(b"INFO "))
        return found
