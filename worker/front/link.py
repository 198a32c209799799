"""Starts an engine process and holds the two ends that the front has of it: a socket and a process id."""

import asyncio
import contextlib
import signal
import socket
import sys
from typing import Protocol

import msgspec

from worker.engine.settings import EngineSettings


class Link(Protocol):
    """An engine loop at the other end of a socket."""

    sock: socket.socket
    pid: int

    def kill(self) -> None:
        """Ends the other side at once. Safe to call again."""
        ...

    async def wait(self) -> str:
        """Returns how the other side ended, once it has."""
        ...


class ProcessLink:
    """An engine process, started with `python -m worker.engine.child`."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self._process = process
        self.sock = sock
        self.pid = process.pid

    def __repr__(self) -> str:
        return f"<ProcessLink to {self.pid}>"

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def wait(self) -> str:
        status = await self._process.wait()
        if status < 0:
            return f"engine process {self.pid} was killed by {signal.Signals(-status).name}"
        return f"engine process {self.pid} exited with status {status}"


async def spawn(settings: EngineSettings) -> ProcessLink:
    """Starts an engine process. It ends by itself when the socket closes, so it can't outlive its front."""
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "worker.engine.child",
            str(theirs.fileno()),
            msgspec.json.encode(settings).decode(),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ProcessLink(process, ours)
