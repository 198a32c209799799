"""The nursery and its forks, as the engine sees them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec

from tokenbus.worker.engine.constraints.grammars.vocabulary import Encode, ModelTokens
from tokenbus.worker.engine.constraints.isolated import messages
from tokenbus.worker.engine.constraints.isolated.channel import Channel

_REPORTS: msgspec.msgpack.Decoder[messages.Report] = msgspec.msgpack.Decoder(messages.Report)
_VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "GLIBC_TUNABLES": "", "RUST_BACKTRACE": "0"}
"""Threads would not survive a fork, each fork would copy huge pages whole, and a process at its memory limit can't
allocate a backtrace."""


class ConstraintProcess:
    """A process from the nursery. One thread at a time may use it, but any may kill it."""

    def __init__(self, sock: socket.socket, encode: Encode) -> None:
        self._channel = Channel(sock, _REPORTS)
        self._encode = encode
        self._pidfd: int | None = None
        self._lock = threading.Lock()
        """Guards the descriptor, whose number may be reused once it is closed."""

    def __repr__(self) -> str:
        return f"<ConstraintProcess {self._channel!r}>"

    def send(self, message: messages.ChannelMessage) -> None:
        """Raises EOFError if it has ended."""
        self._channel.send(message)

    def receive(
        self, timeout_s: float | None = None
    ) -> messages.MatcherState | messages.Failed | messages.Compiled | None:
        """Returns its next report, tokenizing texts for it meanwhile; None after the timeout. Raises EOFError if it has
        ended."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while until is None or self._channel.has_message(max(0.0, until - time.monotonic())):
            match self._channel.receive():
                case messages.Encode(text):
                    self._channel.send(messages.Encoded(self._encode(text)))
                case messages.Born():
                    raise AssertionError("it is born once")
                case report:
                    return report
        return None

    def fork(self) -> "ConstraintProcess":
        """Returns a copy of the process. Raises EOFError if it ends before there is one."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._channel.send(messages.Fork(), [theirs.fileno()])
            except EOFError:
                ours.close()
                raise
        child = ConstraintProcess(ours, self._encode)
        child._wait_for_birth()
        return child

    def kill(self) -> None:
        """Kills it at once, whatever it is computing; its user gets an EOFError."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Ends it and releases its resources."""
        self.kill()
        self._channel.close()
        with self._lock:
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    def _wait_for_birth(self) -> None:
        try:
            assert isinstance(self._channel.receive(), messages.Born)
        except EOFError:
            self._channel.close()
            raise
        self._pidfd = self._channel.take_descriptor()


class Nursery:
    """The process that has a model's vocabulary and forks. It ends with this one."""

    def __init__(self, tokens: ModelTokens) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tokenbus.worker.engine.constraints.isolated.nursery", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ | _VARIABLES,
            )
        self._process = ConstraintProcess(ours, tokens.encode)
        self._process.send(messages.Setup(list(tokens.token_bytes), tuple(tokens.end_token_ids)))

    def __repr__(self) -> str:
        return f"<Nursery {self.pid}>"

    @property
    def pid(self) -> int:
        return self._child.pid

    def fork(self) -> ConstraintProcess:
        """Returns a process that compiles one constraint. Raises EOFError if the nursery has ended."""
        if self._child.poll() is not None:
            raise EOFError
        return self._process.fork()

    def close(self) -> None:
        """Ends it, but not its forks."""
        self._process.close()
        self._child.kill()
        self._child.wait()
