"""`tokenbus up`: the whole system on one machine, in the foreground."""

import argparse
import asyncio
import collections
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenbus.cli.commands import gateway, router, worker
from tokenbus.cli.console import (
    arguments,
    audit_flags,
    config,
    connection_flags,
    first_key,
    key_flags,
    nats_server,
    screen,
    serve,
    state,
    store_room,
)
from tokenbus.cli.console.flags import EXIT_BAD_SETTINGS, Parser, command_line, dest_of, text_of
from tokenbus.cli.console.instructions import SystemAddresses
from tokenbus.cli.console.run_logs import RunLogs
from tokenbus.cli.console.session import print_error
from tokenbus.cli.console.supervisor import ProcessSupervisor, StartError, end_of
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.demo import MODEL_PATH, ONNX_PATH
from tokenbus.gateway.admission import keys
from tokenbus.gateway.admission.settings import GatewaySettings
from tokenbus.gateway.http import listen
from tokenbus.protocol.access import key_audit
from tokenbus.protocol.access.audit_log import AuditSettings
from tokenbus.protocol.access.key_audit import KeyAudit
from tokenbus.protocol.access.key_source import BUCKET, KeySettings
from tokenbus.protocol.access.key_stores import KeyStore, KeyStoreError
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bucket import BucketError
from tokenbus.protocol.bus.settings import BusSettings
from tokenbus.protocol.process import signals
from tokenbus.protocol.process.cores import usable_cores
from tokenbus.protocol.telemetry import logs, tracing
from tokenbus.protocol.wire import errors, messages

_COMMAND = "tokenbus up"
_READY_TIMEOUT_S = 600.0
_POLL_S = 0.2
_REFRESH_S = 1.0
_GRACE_S = 10.0
_HANDOVER_S = 3.0
"""A restarted worker gives up its streams at once; when everything stops there is no other worker to take them."""
_SPARE_S = 5.0
"""Time after the grace that a process has to end before it is killed."""
_GATEWAY_PORTS = range(8000, 8100)
_METRICS_HOST = "127.0.0.1"
_METRICS_PORTS = {"router": range(9100, 9110), "worker": range(9110, 9130), "gateway": range(9130, 9140)}


_GATEWAY = GatewaySettings()
_CHOSEN = ("role", "worker-id", "inbox-prefix")
"""Flags of workers that are no flags here: the system chooses their values."""


def add_flags(parser: Parser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="*", help="like --model, which may be given instead")
    flag = parser.group("system")
    flag("--workers", arguments.whole(1), "number of workers", 2)
    flag("--prefill-workers", arguments.COUNT, "how many of these compute prompts for the others", 0)
    flag("--port", arguments.PORT, "port of the embedded broker; 0: any free port", 4222)
    flag("--nats", arguments.URL, "use this broker instead of starting one")
    flag("--host", arguments.text("ADDRESS"), "address that the HTTP API listens on", unset=_GATEWAY.host)
    taken = f"{_GATEWAY_PORTS[0]}, or the next free one"
    flag("--gateway-port", arguments.PORT, "port of the HTTP API; 0: any free port", unset=taken)
    flag("--no-gateway", arguments.SWITCH, "do not start a gateway")
    metrics = "serve /metrics of each process, on ports from 9100 (router), 9110 (workers) and 9130 (gateway)"
    flag("--metrics", arguments.SWITCH, metrics)
    unset = f"{BUCKET} without a value, and else there are none"
    flag.add(key_flags.KEYS._replace(const=BUCKET, unset=unset))
    flag("--json", arguments.SWITCH, "print one line of JSON when the system is ready")
    file = "settings of workers, router and gateway in TOML, named like their options"
    flag("--config", arguments.FILE, file, variable=config.FILE_VARIABLE)
    flag.add(serve.TRACES)
    own, parser.left_out = set(parser.flags), _CHOSEN
    worker.add_own_flags(parser, is_required=False)
    parser.set_defaults(run=run, passed_on=parser.pass_on(name for name in parser.flags if name not in own))


class ProcessArguments(NamedTuple):
    """The command lines of the system's processes, without what is known only once the broker runs."""

    worker: list[str]
    router: list[str]
    gateway: list[str]


class SystemSettings(NamedTuple):
    """The settings of the system, checked before anything is started."""

    arguments: ProcessArguments
    names: list[str]
    """The served names of its models."""
    host: str
    """The address of the HTTP API."""
    port: int | None
    """Its port; None for the first free one."""
    is_open: bool
    """Whether the HTTP API takes requests without a key."""
    key_settings: KeySettings
    """Where the keys of the HTTP API are."""
    audit: AuditSettings
    bus: BusSettings
    """The connection to the broker that the options name, if any."""
    prefix: str
    """The prefix of all subjects."""
    grace_s: float
    """Time that running requests have to finish when the system stops."""
    stop_s: float
    """Time after which a process that still runs then is killed."""


def settings_of(options: argparse.Namespace) -> SystemSettings:
    """Returns the system's settings: those of each process are read as that process will read them. Raises ValueError,
    with one line for each mistake, and StartError for a model or an adapter that can't be used."""
    if options.prefill_workers >= options.workers:
        raise ValueError("--prefill-workers must be less than --workers")
    # Credentials in the environment, or in the file, are not for the embedded broker.
    common = [f"--nats={options.nats}"] if options.nats else connection_flags.anonymous_flags()
    common += [f"--config={options.config}"] if options.config else []
    common += [f"--otlp-traces-endpoint={options.otlp_traces_endpoint}"] if options.otlp_traces_endpoint else []
    given = [*common, *(f"--model={one}" for one in options.models), *command_line(options.passed_on, options)]
    found = _worker_options(options, given)
    if not found.model:
        demo = ONNX_PATH if found.engine == "onnx" else MODEL_PATH
        given += [f"--model={demo}", *([] if found.served_name else ["--served-name=demo"])]
        found = _worker_options(options, given)
    worker.settings_of(found)
    tracing.check_endpoint(found.otlp_traces_endpoint)
    problem, status = worker.start_problem(found)  # workers inherit the folder for models from the Hub
    if problem:
        raise ValueError(problem) if status == EXIT_BAD_SETTINGS else StartError(problem)
    cores, busy = usable_cores(), options.workers * min(len(found.model), worker.BUSY_MODELS)
    given += [f"--threads={found.threads or max(1, cores // busy)}"]
    given += [f"--{name}={text_of(getattr(found, dest_of(name)))}" for name in _defaults(options)]
    with_keys = [*common, *([f"--keys={options.keys}"] if options.keys else [])]
    if found.audit and not options.nats and options.keys != BUCKET:
        raise ValueError("--audit needs a broker with JetStream: pass --keys too, or --nats with the address of one")
    for_audit = command_line([flag for flag in options.passed_on if flag.title == audit_flags.TITLE], options)
    for_router = [*with_keys, *for_audit, *(["--usage"] if options.keys == BUCKET else [])]
    router.settings_of(_options_of("router", router.add_flags, for_router))
    acting = [*with_keys, *for_audit, "--console-operate"]
    for_gateway = _options_of("gateway", gateway.add_flags, acting)
    gateway_settings = gateway.settings_of(for_gateway)
    port = None if for_gateway.port == _GATEWAY.port else for_gateway.port
    return SystemSettings(
        arguments=ProcessArguments(
            ["worker", *given], ["router", *for_router], ["gateway", *acting, f"--grace-s={_GRACE_S:g}"]
        ),
        names=worker.names_of(found),
        host=options.host or for_gateway.host,
        port=port if options.gateway_port is None else options.gateway_port,
        is_open=gateway_settings.allows_anonymous,
        key_settings=gateway_settings.key_settings,
        audit=audit_flags.settings_of(found),
        bus=connection_flags.settings_of(found),
        prefix=found.prefix,
        grace_s=found.grace_s,
        stop_s=max(_GRACE_S, found.grace_s + found.handover_s) + _SPARE_S,
    )


def _defaults(options: argparse.Namespace) -> dict[str, float]:
    """Returns the defaults that differ from those of a worker which runs alone."""
    return {"memory-share": 1 / options.workers, "grace-s": _GRACE_S, "handover-s": _HANDOVER_S}


def _worker_options(options: argparse.Namespace, given: list[str]) -> argparse.Namespace:
    def add_flags(parser: Parser) -> None:
        worker.add_flags(parser, is_required=False)
        for name, default in _defaults(options).items():
            parser.change_default(name, default)

    return _options_of("worker", add_flags, given)


def _options_of(section: str, add_flags: Callable[[Parser], None], given: list[str]) -> argparse.Namespace:
    """Returns the options of one process, from these arguments, its variables and the settings file."""
    parser = Parser(section)
    add_flags(parser)
    return config.parse(parser, section, given)


class LocalSystem:
    """Starts a broker, a router, workers and a gateway, shows what they do, and stops them in reverse order."""

    def __init__(
        self,
        options: argparse.Namespace,
        settings: SystemSettings,
        run_logs: RunLogs,
        out: screen.GuardedScreen,
    ) -> None:
        self._options = options
        self._settings = settings
        self._bus = settings.bus
        self._logs = run_logs
        self._out = out
        self._broker: nats_server.NatsServer | None = None
        self._gateway_socket: socket.socket | None = None
        self._metrics_sockets: dict[str, socket.socket] = {}
        """By process name. Like the gateway's they stay open, so that a restarted process keeps its address."""
        self._is_ready = False
        self._shortage = ""
        """The room that the embedded broker lacks for what it should store, in words."""
        self._first_key = ""
        self._supervisor = ProcessSupervisor(run_logs.folder, out.write)

    def __repr__(self) -> str:
        return f"<LocalSystem at {self._bus.redacted_url}: {self._supervisor!r}>"

    async def run(self) -> None:
        """Runs until SIGINT or SIGTERM, until its terminal is closed, or until nothing reads its output any more.

        Raises NatsServerError, StartError, ConnectionError, and BrokenPipeError in the last case."""
        stopped = asyncio.Event()
        self._out.on_reader_gone = stopped.set
        with signals.on_stop(stopped.set, self._kill), _on_hangup(stopped.set):
            try:
                await signals.unless_stopped(stopped, self._serve())
            except signals.StoppedError:
                pass
            finally:
                if self._is_ready:
                    grace = f"running requests have up to {self._settings.grace_s:g} s to finish"
                    self._out.write(f"stopping: {grace}; Ctrl-C again to stop at once")
                await self._stop()
        if self._out.is_reader_gone:
            raise BrokenPipeError

    def _kill(self) -> None:
        self._supervisor.kill()
        if self._broker is not None:
            self._broker.kill()
        self._out.close()

    async def _serve(self) -> None:
        # before anything is started: the ports may be taken
        if not self._options.nats:
            nats_server.check_port(self._options.port)
        if not self._options.no_gateway:
            self._gateway_socket = listen_on(self._settings.host, self._settings.port, self._out.write)
            if self._settings.is_open and not listen.is_loopback(self._gateway_socket):
                self._out.write(f"everyone who reaches {self._settings.host} may use the HTTP API: see {keys.VARIABLE}")
        self._out.write(f"starting; logs: {self._logs.folder}")
        if self._logs.problem:
            self._out.write(f"they will be lost there, since they can't be kept: {self._logs.problem}")
        if not self._options.nats:
            self._shortage = self._shortage_of(self._broker_store())
            self._broker = await self._start_broker(self._options.port)
            self._bus = BusSettings(url=self._broker.url)
            self._supervisor.keep(self._keep_broker(self._broker))
        await self._with_keys(lambda store, _: store.create())
        if self._shortage:
            self._out.write(f"not all of it can be stored: {self._shortage}")
        self._start_processes()
        async with await WireClient.connect(settings=self._bus, prefix=self._settings.prefix) as client:
            reply = await self._until_ready(client)
            self._is_ready = True
            await self._with_keys(self._make_first_key)  # not before it can be shown
            self._out.ready(self._addresses(reply), reply)
            while True:
                self._supervisor.check()
                self._logs.shorten()
                self._out.show(await self._models(client))
                await asyncio.sleep(_REFRESH_S)

    async def _start_broker(self, port: int) -> nats_server.NatsServer:
        """Raises NatsServerError."""
        return await nats_server.start(port, self._logs.folder / "nats-server.log", store=self._broker_store())

    async def _keep_broker(self, broker: nats_server.NatsServer) -> None:
        """Starts the broker again at its address whenever it ends. Raises NatsServerError if that fails."""
        while True:
            self._out.write(f"nats-server {end_of(await broker.wait())}; restarting")
            self._broker = broker = await self._start_broker(broker.port)

    def _broker_store(self) -> Path | None:
        """Returns the folder for what the embedded broker stores; None if there is nothing to store."""
        if self._settings.key_settings.keys != BUCKET:
            return None
        # Brokers on fixed ports keep their keys. One on any free port would meet those of another system.
        return state.folder(f"broker-{self._options.port}") if self._options.port else self._logs.folder / "broker"

    def _shortage_of(self, store: Path | None) -> str:
        if store is None or store_room.is_used(store):
            return ""
        audit = self._settings.audit
        return store_room.shortage(store, audit.audit_mib << 20 if audit.audit else 0)

    async def _with_keys(self, act: Callable[[KeyStore, nats.Connection], Awaitable[None]]) -> None:
        """Does something with the store of keys, if there is one. Raises StartError."""
        if not self._settings.key_settings.are_used:
            return
        connection = await nats.connect(self._bus, _COMMAND)
        try:
            await act(self._settings.key_settings.store(connection, self._settings.prefix), connection)
        except KeyStoreError as error:
            raise StartError(
                f"there can be no keys: {error}" + (f"; {self._shortage}" if self._shortage else "")
            ) from error
        finally:
            await connection.close()

    async def _make_first_key(self, store: KeyStore, connection: nats.Connection) -> None:
        made = await first_key.make(store, _COMMAND)
        if made is None:
            return
        self._first_key, record = made
        if self._settings.audit.audit:
            log = KeyAudit(connection, self._settings.prefix, self._settings.audit, _COMMAND)
            try:
                await log.add("create", record, **key_audit.facts_of(record))
            except BucketError as error:
                self._out.write(f"the first key {record.id} is not in the audit log: {error}")

    def _addresses(self, reply: messages.ModelsReply) -> SystemAddresses:
        names = dict.fromkeys([*self._settings.names, *(one.model for one in reply.models)])
        return SystemAddresses(
            nats=self._bus.redacted_url,
            http=listen.base_url(self._gateway_socket) if self._gateway_socket else "",
            models=tuple(names),
            log_folder=self._logs.folder,
            metrics=self._metrics_urls(),
            has_password=self._bus.redacted_url != self._bus.url,
            needs_key=not self._settings.is_open,
            first_key=self._first_key,
        )

    def _start_processes(self) -> None:
        broker = [] if self._broker is None else [f"--nats={self._broker.url}"]
        of_worker, of_router, of_gateway = self._settings.arguments
        self._start("router", [*of_router, *broker])
        for number in range(1, self._options.workers + 1):
            name = f"worker-{number}"
            # On a shared broker other machines run workers of the same numbers.
            worker_id = f"{socket.gethostname()}-{os.getpid()}-{number}" if self._options.nats else name
            own = [f"--worker-id={worker_id}", f"--role={self._role_of(number)}"]
            self._start(name, [*of_worker, *broker, *own])
        if self._gateway_socket is not None:
            fd = self._gateway_socket.fileno()
            self._start("gateway", [*of_gateway, *broker, f"--fd={fd}"], fd)

    def _role_of(self, number: int) -> messages.WorkerRole:
        """Returns the role of a worker by its number, which begins at 1."""
        num_prefill = self._options.prefill_workers
        if number <= num_prefill:
            return messages.WorkerRole.PREFILL
        return messages.WorkerRole.DECODE if num_prefill else messages.WorkerRole.BOTH

    def _start(self, name: str, arguments: list[str], *fds: int) -> None:
        if self._options.metrics:
            listening = self._metrics_sockets[name] = _bind_metrics(_METRICS_PORTS[arguments[0]])
            arguments, fds = [*arguments, "--metrics-fd", str(listening.fileno())], (*fds, listening.fileno())
        self._supervisor.start(name, arguments, fds)

    def _metrics_urls(self) -> dict[str, str]:
        ports = {name: listening.getsockname()[1] for name, listening in self._metrics_sockets.items()}
        return {name: f"http://{_METRICS_HOST}:{port}/metrics" for name, port in ports.items()}

    async def _until_ready(self, client: WireClient) -> messages.ModelsReply:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            self._supervisor.check()
            reply = await self._models(client)
            if reply is not None and self._num_ready(reply) >= self._options.workers:
                return reply
            self._out.loading(reply, self._options.workers)
            await asyncio.sleep(_POLL_S)
        raise StartError(f"not ready after {_READY_TIMEOUT_S:g} s; logs: {self._logs.folder}")

    def _num_ready(self, reply: messages.ModelsReply) -> int:
        """Returns how many workers have all models ready or loadable."""
        ready = collections.Counter(
            card.model for card in reply.cards if card.loadable or card.state is messages.WorkerState.READY
        )
        return min(ready[name] for name in self._settings.names)

    async def _models(self, client: WireClient) -> messages.ModelsReply | None:
        try:
            return await client.models(timeout_s=2.0)
        except errors.RequestError:
            return None

    async def _stop(self) -> None:
        if self._gateway_socket is not None:
            self._gateway_socket.close()
        for listening in self._metrics_sockets.values():
            listening.close()
        await self._supervisor.stop(self._settings.stop_s)
        if self._broker is not None:
            self._broker.stop()


@contextlib.contextmanager
def _on_hangup(stop: Callable[[], object]) -> Iterator[None]:
    """Within the block, SIGHUP stops the system unless it was started with nohup. Closing a terminal may send several,
    so a second one means nothing."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def listen_on(
    host: str, port: int | None, say: Callable[[str], None], candidates: Sequence[int] = _GATEWAY_PORTS
) -> socket.socket:
    """Returns the gateway's socket, which stays open while a gateway restarts. Without a port of the user's choice it
    is the first free one of `candidates`, and `say` is told so if another is taken. Raises StartError."""
    if port is not None:
        try:
            return listen.bind(host, port)
        except listen.ListenError as error:
            raise StartError(f"{error}: pass --gateway-port 0 for a free port, or --no-gateway") from error
    for candidate in candidates:
        try:
            listening = listen.bind(host, candidate)
        except listen.ListenError as error:
            if not error.is_taken:
                raise StartError(f"{error}: pass another --host, or --no-gateway") from error
            continue
        if candidate != candidates[0]:
            say(f"port {candidates[0]} is taken: the HTTP API is on port {candidate}")
        return listening
    taken = f"the ports {candidates[0]} to {candidates[-1]} are taken"
    raise StartError(f"{taken}: pass --gateway-port 0 for a free port, or --no-gateway")


def _bind_metrics(ports: range) -> socket.socket:
    """Returns a socket for one process's metrics. Raises StartError."""
    from tokenbus.protocol.http import status_server  # takes a fifth of a second to import

    try:
        return status_server.bind(_METRICS_HOST, ports)
    except ValueError as error:
        raise StartError(str(error)) from error


def run(options: argparse.Namespace) -> int:
    """Runs the system until it is stopped; returns the exit status. Raises ValueError for wrong settings."""
    logs.log_errors_only()
    out = screen.make(as_json=options.json)
    try:
        settings = settings_of(options)
        with contextlib.closing(out), contextlib.closing(RunLogs.create(state.folder("logs"))) as run_logs:
            asyncio.run(LocalSystem(options, settings, run_logs, out).run())
    except BrokenPipeError:
        raise  # also a ConnectionError, but it means that the reader of our output is gone
    except (nats_server.NatsServerError, StartError, ConnectionError) as error:
        return print_error(str(error))
    return 0
