"""`tokenbus up`: the whole system on one machine, in the foreground."""

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

from tokenbus.cli import connection_flags, nats_server, screen
from tokenbus.cli.supervisor import EXIT_BAD_SETTINGS, StartError, SupervisedProcess
from tokenbus.client import Client
from tokenbus.demo import MODEL_PATH, ONNX_PATH
from tokenbus.gateway import listen
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.process import shutdown
from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.engine.models import registry

_READY_TIMEOUT_S = 600.0
_POLL_S = 0.2
_WATCH_S = 1.0
_GRACE_S = 10.0
_GATEWAY_HOST = "127.0.0.1"
_GATEWAY_PORT = 8000
_METRICS_PORTS = {"router": "9100-9109", "worker": "9110-9129", "gateway": "9130-9139"}


class Up:
    """Starts broker, router, workers and gateway, shows them, and takes them down in reverse."""

    def __init__(
        self, options: argparse.Namespace, settings: nats.Settings, log_folder: Path, out: screen.Screen
    ) -> None:
        """`settings` are of the broker that the options name, if they name one."""
        self._options = options
        self._settings = settings
        self._log_folder = log_folder
        self._out = out
        self._broker: nats_server.NatsServer | None = None
        self._listening: socket.socket | None = None
        self._serves = False
        self._children: list[SupervisedProcess] = []
        self._keepers: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Up at {self._settings.redacted_url} with {len(self._children)} processes>"

    async def run(self) -> None:
        """Until SIGINT or SIGTERM. Raises NatsServerError, StartError and ConnectionError."""
        leave = asyncio.Event()
        with shutdown.on_stop(leave.set, self._end_at_once):
            try:
                await shutdown.unless_stopped(leave, self._serve())
            except shutdown.StoppedError:
                pass
            finally:
                if self._serves:
                    self._out.write(
                        "stopping: running requests have up to 10 s to finish; Ctrl-C again to stop at once"
                    )
                await self._stop()

    def _end_at_once(self) -> None:
        for child in self._children:
            child.kill()
        if self._broker is not None:
            self._broker.kill()
        self._out.close()

    async def _serve(self) -> None:
        self._out.write(f"starting; logs: {self._log_folder}")
        self._listening = _listen(self._options)
        await self._start_broker()
        self._start_children()
        async with await Client.connect(settings=self._settings) as client:
            reply = await self._until_ready(client)
            self._serves = True
            http = listen.base_url(self._listening) if self._listening else ""
            name, metrics = self._options.served_name, self._shown_at()
            place = screen.SystemAddresses(self._settings.redacted_url, http, name, self._log_folder, metrics)
            self._out.ready(place, reply)
            while True:
                self._raise_refusals()
                self._out.show(await self._ask(client))
                await asyncio.sleep(_WATCH_S)

    async def _start_broker(self) -> None:
        if self._options.nats:
            return
        self._broker = await nats_server.start(self._options.port, self._log_folder / "nats-server.log")
        self._settings = nats.Settings(url=self._broker.url)

    def _start_children(self) -> None:
        options = self._options
        common = [
            "--nats",
            self._settings.url,
            *(connection_flags.anonymous_flags() if self._broker is not None else []),
        ]
        common += ["--otlp-traces-endpoint", options.otlp_traces_endpoint]
        self._add("router", ["router", *common, *self._metrics("router")])
        threads = options.threads or max(1, len(os.sched_getaffinity(0)) // options.workers)
        model = ["--model", str(options.model), "--served-name", options.served_name, "--threads", str(threads)]
        model += ["--engine", options.engine]
        own = self._metrics("worker")
        for number in range(1, options.workers + 1):
            name = f"worker-{number}"
            worker_id = f"{socket.gethostname()}-{os.getpid()}-{number}" if options.nats else name
            self._add(name, ["worker", *common, *model, "--worker-id", worker_id, "--grace-s", str(_GRACE_S), *own])
        if self._listening is not None:
            fd = self._listening.fileno()
            self._add(
                "gateway",
                ["gateway", *common, "--fd", str(fd), "--grace-s", str(_GRACE_S), *self._metrics("gateway")],
                (fd,),
            )

    def _metrics(self, command: str) -> list[str]:
        """The flags that show a process's metrics, where that is wanted."""
        return ["--metrics-port", _METRICS_PORTS[command]] if self._options.metrics else []

    def _shown_at(self) -> dict[str, str]:
        """Where each process shows its metrics, as it says in its log."""
        found = {}
        for child in self._children:
            port = child.last_logged("status_page", "port")
            if port is not None:
                found[child.name] = f"http://127.0.0.1:{port}/metrics"
        return found

    def _add(self, name: str, arguments: list[str], fds: tuple[int, ...] = ()) -> None:
        child = SupervisedProcess(name, arguments, self._log_folder / f"{name}.log", self._out.write, fds)
        self._children.append(child)
        self._keepers.append(asyncio.create_task(child.supervise()))

    async def _until_ready(self, client: Client) -> messages.ModelsReply:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            self._raise_refusals()
            reply = await self._ask(client)
            if reply is not None and _num_ready(reply, self._options.served_name) >= self._options.workers:
                return reply
            self._out.loading(reply, self._options.workers)
            await asyncio.sleep(_POLL_S)
        raise StartError(f"not ready after {_READY_TIMEOUT_S:g} s; logs: {self._log_folder}")

    async def _ask(self, client: Client) -> messages.ModelsReply | None:
        try:
            return await client.models(timeout_s=2.0)
        except errors.RequestError:
            return None

    def _raise_refusals(self) -> None:
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()

    async def _stop(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        router_last = sorted(self._children, key=lambda child: child.name == "router")
        for child in router_last:
            child.terminate()
            if child.name == "router":
                await child.wait_stopped(_GRACE_S)
        await asyncio.gather(*(child.wait_stopped(_GRACE_S + 5) for child in router_last))
        if self._broker is not None:
            self._broker.stop()


def _listen(options: argparse.Namespace) -> socket.socket | None:
    """The socket of the gateway: it outlives one that has to be started again. Raises StartError."""
    if options.no_gateway:
        return None
    wanted = options.gateway_port
    try:
        return listen.bind(_GATEWAY_HOST, _GATEWAY_PORT if wanted is None else wanted)
    except listen.ListenError as error:
        if wanted is None:
            return listen.bind(_GATEWAY_HOST, 0)
        raise StartError(f"{error}: pass --gateway-port 0 for a free port, or --no-gateway") from error


def _num_ready(reply: messages.ModelsReply, name: str) -> int:
    return sum(worker.state is messages.WorkerState.READY for worker in screen.workers_of(reply, name))


def run(options: argparse.Namespace) -> int:
    """Runs `up`; returns the exit status."""
    if options.model is None:
        options.model = str(ONNX_PATH if options.engine == "onnx" else MODEL_PATH)
        options.served_name = options.served_name or "demo"
    options.served_name = options.served_name or registry.served_name(options.model)
    logs.log_errors_only()
    try:
        settings = connection_flags.settings_from_environment(options.nats) if options.nats else nats.Settings()
    except ValueError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    out = screen.make(as_json=options.json)
    log_folder = Path(tempfile.mkdtemp(prefix="tokenbus-"))
    try:
        with contextlib.closing(out):
            asyncio.run(Up(options, settings, log_folder, out).run())
    except (nats_server.NatsServerError, StartError, ConnectionError) as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return 1
    return 0
