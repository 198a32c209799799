"""Brokers whose clients show API keys, and instances of `tokenbus auth` in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import nats
import pytest
from nats.aio.client import Client as Nats

from tests.support.ports import free_ports
from tokenbus.auth import broker_config, seeds, serve
from tokenbus.auth.callout_metrics import CalloutMetrics
from tokenbus.auth.settings import AuthSettings
from tokenbus.cli.console import nats_server
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.audit_log import AuditSettings
from tokenbus.protocol.access.key_source import BUCKET, KeySettings
from tokenbus.protocol.access.key_stores import BucketKeys, FileKeys
from tokenbus.protocol.access.keys import KeyRecord
from tokenbus.protocol.bus import connection
from tokenbus.protocol.bus.settings import BusSettings, Credentials

PASSWORD = "password-of-processes"
PASSWORDS = tuple(f"TOKENBUS_{user}_PASSWORD" for user in ("CALLOUT", "ROUTER", "WORKER", "GATEWAY", "OPERATOR"))
"""The variables in which a broker expects the passwords of its users."""


class KeyBroker:
    """One broker, or a cluster of two, with the configuration that `tokenbus auth-init` prints."""

    def __init__(self, folder: Path, servers: list[nats_server.NatsServer]) -> None:
        self.servers = servers
        self.seeds = seeds.read(folder / "callout.seeds")
        self.file = FileKeys(folder / "keys.json")
        self.store: BucketKeys | FileKeys = self.file
        self.clients: list[Nats] = []
        self.disconnected = asyncio.Event()

    @property
    def url(self) -> str:
        return self.servers[0].url

    def bus_settings(self, user: str, inbox: str) -> BusSettings:
        return BusSettings(self.url, inbox_prefix=inbox, credentials=Credentials(user, PASSWORD))

    @contextlib.asynccontextmanager
    async def auth(self, *, audit: bool = False) -> AsyncIterator[CalloutMetrics]:
        """Runs one instance, with keys from the store."""
        measured, where = CalloutMetrics(), BUCKET if isinstance(self.store, BucketKeys) else str(self.file.path)
        settings = AuthSettings(key_settings=KeySettings(where), audit_settings=AuditSettings(audit=audit))
        async with contextlib.AsyncExitStack() as stack:
            found = []
            for user in ("auth-system", "auth"):
                found.append(await connection.connect(self.bus_settings(user, "_INBOX_auth"), user))
                stack.push_async_callback(found[-1].close)
            await stack.enter_async_context(serve.answering(*found, settings, self.seeds, measured))
            yield measured

    async def use_bucket(self) -> connection.Connection:
        """Keeps keys in the broker's bucket from now on, written by an operator, whose connection is returned."""
        operator = await connection.connect(self.bus_settings("operator", "_INBOX_operator"), "operator")
        store = KeySettings(BUCKET).store(operator, AuthSettings().prefix)
        await store.create()
        self.store = store
        return operator

    async def new_key(self, tenant: str = "acme", **fields: object) -> tuple[str, KeyRecord]:
        """Stores a new key; returns it and its record."""
        made = keys.new_key()
        record = KeyRecord(id=made.id, hash=made.hash, tenant=tenant, **fields)  # type: ignore[arg-type]
        await self.store.create()
        await self.store.add(record)
        return made.text, record

    async def change(self, record: KeyRecord, **fields: object) -> KeyRecord:
        """Stores a changed record and returns it."""
        stored = await self.store.get(record.id)
        assert stored is not None
        changed: KeyRecord = msgspec.structs.replace(stored.record, **fields)
        await self.store.replace(changed, stored.revision)
        return changed

    async def connect(self, key: str, record: KeyRecord | None = None, server: int = 0) -> Nats:
        """Connects a client that shows a key, and does not come back."""

        async def note(error: Exception) -> None:
            pass  # nats-py would print it

        async def lost() -> None:
            self.disconnected.set()

        inbox = "_INBOX" if record is None else f"_INBOX_key.{record.tenant}.{record.id}"
        client = await nats.connect(
            self.servers[server].url,
            token=key,
            inbox_prefix=inbox,
            error_cb=note,
            disconnected_cb=lost,
            allow_reconnect=False,
        )
        self.clients.append(client)
        return client

    async def answer_to(self, **options: str) -> bytes:
        """Returns the broker's answer to a client that connects with these options: PONG, or an error."""
        return (await self._answers(options, b""))[0]

    async def denied(self, key: str, publish: Iterable[str] = (), subscribe: Iterable[str] = ()) -> set[str]:
        """Returns those of the subjects that the broker denies to a client that shows a key."""
        commands = [f"PUB {subject} 0\r\n\r\n" for subject in publish]
        commands += [f"SUB {subject} {number}\r\n" for number, subject in enumerate(subscribe, 1)]
        answers = await self._answers({"auth_token": key}, "".join([*commands, "PING\r\n"]).encode())
        assert answers[0] == answers.pop() == b"PONG", answers
        del answers[0]
        assert all(answer.startswith(b"-ERR 'Permissions Violation") for answer in answers)
        return {answer.split(b'"')[1].decode() for answer in answers}

    async def _answers(self, options: dict[str, str], commands: bytes) -> list[bytes]:
        """Returns what the broker says to a client from its connecting to its end; it is told nothing else."""
        address = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        with contextlib.closing(writer):
            await reader.readline()  # the broker's greeting
            writer.write(b"CONNECT %b\r\nPING\r\n" % msgspec.json.encode({"verbose": False, **options}))
            answers = [await _said(reader)]
            if commands and answers == [b"PONG"]:
                writer.write(commands)
                while len(answers) == 1 or answers[-1] != b"PONG":
                    answers.append(await _said(reader))
        await writer.wait_closed()
        return answers


async def _said(reader: asyncio.StreamReader) -> bytes:
    """Returns the next line that is not the broker's own ping."""
    while (line := (await reader.readline()).strip()) == b"PING":
        pass
    return line


@contextlib.contextmanager
def _passwords() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for variable in PASSWORDS:
            patch.setenv(variable, PASSWORD)
        yield


@contextlib.asynccontextmanager
async def running(folder: Path, num_servers: int = 1) -> AsyncIterator[KeyBroker]:
    """Runs a broker, or a cluster."""
    config = broker_config.broker_config(seeds.create(folder / "callout.seeds"))
    ports = free_ports(num_servers)
    routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports)
    servers = []
    with _passwords():
        for number, port in enumerate(ports):
            own = config.replace('"jetstream"', f'"{folder}/js{number}"') + f"\nserver_name: s{number}\n"
            if num_servers > 1:
                own += f'cluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{routes}] }}\n'
            path = folder / f"nats-{number}.conf"
            path.write_text(own)
            servers.append(await nats_server.start(0, folder / "nats.log", path))
    broker = KeyBroker(folder, servers)
    try:
        yield broker
    finally:
        for client in broker.clients:
            await client.close()
        for server in servers:
            server.stop()
