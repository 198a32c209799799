"""`tokenbus up`: the whole system on one machine, in the foreground."""

import argparse
import asyncio
import collections
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

from tokenbus.cli.commands import worker
from tokenbus.cli.console import arguments, connection_flags, nats_server, screen, serve, state
from tokenbus.cli.console.flags import Parser, command_line
from tokenbus.cli.console.instructions import SystemAddresses
from tokenbus.cli.console.run_logs import RunLogs
from tokenbus.cli.console.session import print_error
from tokenbus.cli.console.supervisor import EXIT_BAD_SETTINGS, ProcessSupervisor, StartError
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.demo import MODEL_PATH, ONNX_PATH
from tokenbus.gateway.http import listen
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.process import signals
from tokenbus.protocol.telemetry import logs, tracing
from tokenbus.protocol.wire import errors, messages

_READY_TIMEOUT_S = 600.0
_POLL_S = 0.2
_REFRESH_S = 1.0
_GRACE_S = 10.0
_HANDOVER_S = 3.0
"""A restarted worker gives up its streams at once; when everything stops there is no other worker to take them."""
_GATEWAY_HOST = "127.0.0.1"
_GATEWAY_PORTS = range(8000, 8100)
_METRICS_HOST = "127.0.0.1"
_METRICS_PORTS = {"router": range(9100, 9110), "worker": range(9110, 9130), "gateway": range(9130, 9140)}


_OWN = ("role", "worker-id", "memory-share", "inbox-prefix")
"""Settings of workers that the system chooses for each of them."""


def add_flags(parser: Parser) -> None:
    flag = parser.group("system")
    flag("--workers", arguments.whole(1), "number of workers", 2)
    flag("--prefill-workers", arguments.COUNT, "how many of these compute prompts for the others", 0)
    flag("--port", arguments.PORT, "port of the embedded broker; 0: any free port", 4222)
    flag("--nats", arguments.URL, "use this broker instead of starting one")
    port = "port of the HTTP API"
    flag("--gateway-port", arguments.PORT, port, unset="8000, or any free port if that is taken")
    flag("--no-gateway", arguments.SWITCH, "do not start a gateway")
    metrics = "serve /metrics of each process, on ports from 9100 (router), 9110 (workers) and 9130 (gateway)"
    flag("--metrics", arguments.SWITCH, metrics)
    flag("--json", arguments.SWITCH, "print one line of JSON when the system is ready")
    flag.add(serve.TRACES)
    own = set(parser.flags)
    worker.add_own_flags(parser, is_required=False)
    passed_on = tuple(flag for name, flag in parser.flags.items() if name not in own)
    parser.set_defaults(run=run, passed_on=passed_on)


class LocalSystem:
    """Starts a broker, a router, workers and a gateway, shows what they do, and stops them in reverse order."""

    def __init__(
        self, options: argparse.Namespace, settings: nats.BusSettings, run_logs: RunLogs, out: screen.GuardedScreen
    ) -> None:
        """`settings` are those of the broker that the options name, if any."""
        self._options = options
        self._settings = settings
        self._logs = run_logs
        self._out = out
        self._broker: nats_server.NatsServer | None = None
        self._gateway_socket: socket.socket | None = None
        self._metrics_sockets: dict[str, socket.socket] = {}
        """By process name. Like the gateway's they stay open, so that a restarted process keeps its address."""
        self._is_ready = False
        self._supervisor = ProcessSupervisor(run_logs.folder, out.write)

    def __repr__(self) -> str:
        return f"<LocalSystem at {self._settings.redacted_url}: {self._supervisor!r}>"

    async def run(self) -> None:
        """Runs until SIGINT or SIGTERM, until its terminal is closed, or until nothing reads its output any more.

        Raises NatsServerError, StartError, ConnectionError, and BrokenPipeError in the last case."""
        stopped = asyncio.Event()
        self._out.on_reader_gone = stopped.set
        with signals.on_stop(stopped.set, self._kill, _stop_signals()):
            try:
                await signals.unless_stopped(stopped, self._serve())
            except signals.StoppedError:
                pass
            finally:
                if self._is_ready:
                    self._out.write(
                        "stopping: running requests have up to 10 s to finish; Ctrl-C again to stop at once"
                    )
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
        self._gateway_socket = _listen(self._options, self._out.write)
        if not self._options.nats:
            nats_server.check_port(self._options.port)
        self._out.write(f"starting; logs: {self._logs.folder}")
        if self._logs.problem:
            self._out.write(f"they will be lost there, since they can't be kept: {self._logs.problem}")
        if not self._options.nats:
            self._broker = await nats_server.start(self._options.port, self._logs.folder / "nats-server.log")
            self._settings = nats.BusSettings(url=self._broker.url)
        self._start_processes()
        async with await WireClient.connect(settings=self._settings) as client:
            reply = await self._until_ready(client)
            self._is_ready = True
            http = listen.base_url(self._gateway_socket) if self._gateway_socket else ""
            addresses = SystemAddresses(
                self._settings.redacted_url,
                http,
                tuple(dict.fromkeys([*self._options.served_name, *(one.model for one in reply.models)])),
                self._logs.folder,
                self._metrics_urls(),
                has_password=self._settings.redacted_url != self._settings.url,
            )
            self._out.ready(addresses, reply)
            while True:
                self._supervisor.check()
                self._logs.shorten()
                self._out.show(await self._models(client))
                await asyncio.sleep(_REFRESH_S)

    def _start_processes(self) -> None:
        options = self._options
        common = ["--nats", self._settings.url, "--otlp-traces-endpoint", options.otlp_traces_endpoint]
        if self._broker is not None:
            common += connection_flags.anonymous_flags()  # credentials in the environment are for another broker
        grace = ["--grace-s", str(_GRACE_S)]
        self._start("router", ["router", *common])
        owners = options.workers * min(len(options.model), worker.BUSY_MODELS)
        given = vars(options) | {
            "threads": options.threads or max(1, len(os.sched_getaffinity(0)) // owners),
            "memory_share": 1 / options.workers,
            "grace_s": _GRACE_S,
            "handover_s": _HANDOVER_S,
        }
        model = command_line(options.passed_on, argparse.Namespace(**given))
        for number in range(1, options.workers + 1):
            name = f"worker-{number}"
            # On a shared broker other machines run workers of the same numbers.
            worker_id = f"{socket.gethostname()}-{os.getpid()}-{number}" if options.nats else name
            self._start(name, ["worker", *common, *model, "--worker-id", worker_id, "--role", self._role_of(number)])
        if self._gateway_socket is not None:
            fd = self._gateway_socket.fileno()
            self._start("gateway", ["gateway", *common, "--fd", str(fd), *grace], fd)

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
        return min(ready[name] for name in self._options.served_name)

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
        await self._supervisor.stop(_GRACE_S + 5)
        if self._broker is not None:
            self._broker.stop()


def _stop_signals() -> list[signal.Signals]:
    """Returns the signals that stop the system; SIGHUP among them, unless it was started with nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [*signals.SIGNALS, *hangup]


def _listen(options: argparse.Namespace, say: Callable[[str], None]) -> socket.socket | None:
    """Returns the gateway's socket, which stays open while a gateway restarts. Without a port of the user's choice it
    is the first free one, and says so. Raises StartError."""
    if options.no_gateway:
        return None
    if options.gateway_port is not None:
        try:
            return listen.bind(_GATEWAY_HOST, options.gateway_port)
        except listen.ListenError as error:
            raise StartError(f"{error}: pass --gateway-port 0 for a free port, or --no-gateway") from error
    for port in _GATEWAY_PORTS:
        try:
            listening = listen.bind(_GATEWAY_HOST, port)
        except listen.ListenError as error:
            if not error.is_taken:
                raise StartError(f"{error}: pass --no-gateway") from error
            continue
        if port != _GATEWAY_PORTS[0]:
            say(f"port {_GATEWAY_PORTS[0]} is taken: the HTTP API is on port {port}")
        return listening
    taken = f"the ports {_GATEWAY_PORTS[0]} to {_GATEWAY_PORTS[-1]} are taken"
    raise StartError(f"{taken}: pass --gateway-port 0 for a free port, or --no-gateway")


def _bind_metrics(ports: range) -> socket.socket:
    """Returns a socket for one process's metrics. Raises StartError."""
    from tokenbus.protocol.http import status_server  # takes a fifth of a second to import

    try:
        return status_server.bind(_METRICS_HOST, ports)
    except ValueError as error:
        raise StartError(str(error)) from error


def run(options: argparse.Namespace) -> int:
    """Runs the system until it is stopped; returns the exit status."""
    if not options.model:
        options.model = [str(ONNX_PATH if options.engine == "onnx" else MODEL_PATH)]
        options.served_name = options.served_name or ["demo"]
    options.served_name = worker.names_of(options)
    logs.log_errors_only()
    if options.prefill_workers >= options.workers:
        return print_error("--prefill-workers must be less than --workers", EXIT_BAD_SETTINGS)
    try:
        settings = connection_flags.settings_from_environment(options.nats) if options.nats else nats.BusSettings()
        tracing.check_endpoint(options.otlp_traces_endpoint)
    except ValueError as error:
        return print_error(str(error), EXIT_BAD_SETTINGS)
    problem, status = worker.start_problem(options)  # its workers inherit the folder for models from the Hub
    if problem:
        return print_error(problem, status)
    out = screen.make(as_json=options.json)
    try:
        with contextlib.closing(out), contextlib.closing(RunLogs.create(state.folder("logs"))) as run_logs:
            asyncio.run(LocalSystem(options, settings, run_logs, out).run())
    except BrokenPipeError:
        raise  # also a ConnectionError, but it means that the reader of our output is gone
    except (nats_server.NatsServerError, StartError, ConnectionError) as error:
        return print_error(str(error))
    except OSError as error:
        return print_error(f"{error.filename}: {error.strerror}")
    return 0
