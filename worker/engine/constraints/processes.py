"""Compiles and follows constraints in processes outside the engine: the nursery, its forks, those that are kept
for reuse, and the matchers that they serve."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec
import numpy as np
import structlog

from tokenbus.protocol.process.child_environment import child_environment
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints import messages
from tokenbus.worker.engine.constraints.compiler import Encode, ModelTokens
from tokenbus.worker.engine.constraints.grammar import ConstraintError
from tokenbus.worker.engine.constraints.matcher import Allowed, unpacked
from tokenbus.worker.engine.constraints.messages import Channel

_REPORTS: msgspec.msgpack.Decoder[messages.Report] = msgspec.msgpack.Decoder(messages.Report)
_VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "GLIBC_TUNABLES": "", "RUST_BACKTRACE": "0"}
"""Threads would not survive a fork, each fork would copy huge pages whole, and a process at its memory limit can't
allocate a backtrace."""
_MAX_KEPT = 16
_MAX_KEPT_BYTES = 256 << 20
_BASE_BYTES = 8 << 20
"""A process has about this much unshared memory, besides what it has compiled."""
_TOO_COSTLY = "takes more than 2 s of CPU time or 192 MiB to compile: make it smaller"
_PATIENCE_S = 0.005
"""The time that a step waits for a follower. Most need a tenth of a millisecond."""
_MAX_PATIENCE_S = 0.25
"""The total time that steps wait for one follower. After that its sequence skips the steps for which it is late."""
_DIED = "takes too much time or memory to follow: make it smaller or less ambiguous"


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
        """Raises EOFError if it ends at once."""
        ours, theirs = socket.socketpair()
        self._process = ConstraintProcess(ours, tokens.encode)
        try:
            with theirs:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "tokenbus.worker.engine.constraints.nursery", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=child_environment(**_VARIABLES),
                )
        except OSError:
            self._process.close()
            raise
        try:
            self._process.send(messages.Setup(list(tokens.token_bytes), tuple(tokens.end_token_ids)))
        except EOFError:
            self.close()
            raise

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


OnProcess = Callable[[ConstraintProcess], None]
_Key = tuple[str, str, str]


class _Template:
    def __init__(self, process: ConstraintProcess, grown_bytes: int) -> None:
        self._process = process
        self._lock = threading.Lock()
        self.num_bytes = _BASE_BYTES + grown_bytes

    def fork(self) -> ConstraintProcess:
        """Raises EOFError if it has been dropped meanwhile."""
        with self._lock:
            return self._process.fork()

    def close(self) -> None:
        with self._lock:
            self._process.close()


class Templates:
    """The processes that have compiled a constraint: the most recently used ones, up to a bound. Thread-safe. Starts
    the nursery with the first constraint."""

    def __init__(self, get_tokens: Callable[[], ModelTokens]) -> None:
        self._get_tokens = get_tokens
        self._nursery: Nursery | None = None
        self._starting = threading.Lock()
        self._kept: OrderedDict[_Key, _Template] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Templates, {len(self._kept)} kept>"

    @property
    def vocab_size(self) -> int:
        return len(self._get_tokens().token_bytes)

    def fork(self, constraint: engine_request.Constraint, on_process: OnProcess) -> ConstraintProcess:
        """Returns a process that has compiled the constraint. `on_process` is called with the process that compiles it,
        and then with the one that is returned: the last one may be killed, since no other sequence needs it.

        Raises ConstraintError, and EOFError if no process can be forked to compile it."""
        key = (constraint.kind, constraint.source, constraint.preamble)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is not None:
            with contextlib.suppress(EOFError):
                child = found.fork()
                on_process(child)
                return child
        template = self._compile(constraint, on_process)
        try:
            child = template.fork()
        except EOFError:  # it was killed
            template.close()
            raise
        on_process(child)
        self._keep(key, template)
        return child

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            kept = list(self._kept.values())
            self._kept.clear()
        for template in kept:
            template.close()
        with self._starting:
            if self._nursery is not None:
                self._nursery.close()

    def _compile(self, constraint: engine_request.Constraint, on_process: OnProcess) -> _Template:
        process = self._fork_nursery()
        on_process(process)
        try:
            process.send(messages.Compile(constraint))
            report = process.receive()
        except EOFError:
            report = None
        if isinstance(report, messages.Compiled):
            return _Template(process, report.grown_bytes)
        process.close()
        if isinstance(report, messages.Failed):
            raise ConstraintError(report.problem, report.line)
        raise ConstraintError(_TOO_COSTLY)

    def _fork_nursery(self) -> ConstraintProcess:
        """Forks the nursery; starts one if there is none, or it has ended."""
        with self._starting:
            if self._is_closed:
                raise EOFError
            if self._nursery is not None:
                with contextlib.suppress(EOFError):
                    return self._nursery.fork()
                self._nursery.close()
            self._nursery = Nursery(self._get_tokens())
            structlog.get_logger().info("constraint_process_started", pid=self._nursery.pid)
            return self._nursery.fork()

    def _keep(self, key: _Key, template: _Template) -> None:
        with self._lock:
            dropped = [old] if (old := self._kept.pop(key, None)) is not None else []
            if self._is_closed:
                dropped.append(template)
            else:
                self._kept[key] = template
            while len(self._kept) > _MAX_KEPT or sum(one.num_bytes for one in self._kept.values()) > _MAX_KEPT_BYTES:
                dropped.append(self._kept.popitem(last=False)[1])
        for one in dropped:
            one.close()


class RemoteMatcher:
    """A `SequenceMatcher` for one process that follows a constraint, so that only its own sequence waits for it.

    The process says in advance which tokens are forced and which may follow them. It is sent each token that is not
    forced, and then computes while the model does."""

    def __init__(self, process: ConstraintProcess, vocab_size: int, on_close: Callable[[], None]) -> None:
        self._process = process
        self._vocab_size = vocab_size
        self._on_close = on_close
        self._forced: deque[int] = deque()
        self._mask = b""
        self._problem: str | None = None
        self._patience_s = _MAX_PATIENCE_S
        self._is_closed = False
        self.is_ready = False

    def __repr__(self) -> str:
        return f"<RemoteMatcher {'ready' if self.is_ready else 'waiting'}, {self._process!r}>"

    def allowed(self) -> Allowed:
        self._check()
        assert not self._forced, self
        return unpacked(np.frombuffer(self._mask, np.uint8), self._vocab_size)

    def forced(self) -> int | None:
        self._check()
        return self._forced[0] if self._forced else None

    def accept(self, token_id: int) -> None:
        """Takes the next token; never waits."""
        self._check()
        if not self._forced:
            self._ask(token_id)
            return
        if token_id != self._forced.popleft():
            raise ConstraintError("another token is forced")
        if not self._forced and not self._mask:
            self._ask(None)

    def accept_forced(self, limit: int) -> list[int]:
        """Takes those known within a few milliseconds; the others stay forced."""
        self._be_patient()
        taken: list[int] = []
        while len(taken) < limit and self._forced:
            taken.append(self._forced[0])
            self.accept(taken[-1])
        return taken

    def wait(self, timeout_s: float | None) -> None:
        """None waits as long as it takes: the process is killed if that is too long."""
        if self.is_ready:
            return
        try:
            report = self._process.receive(timeout_s)
        except EOFError:
            report = messages.Failed(_DIED)
        match report:
            case messages.MatcherState(forced, mask):
                self._forced, self._mask, self.is_ready = deque(forced), mask, True
            case messages.Failed(problem):
                self._problem, self.is_ready = problem, True

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._process.close()
            self._on_close()

    def _be_patient(self) -> None:
        if self.is_ready or self._patience_s <= 0:
            return
        began = time.monotonic()
        self.wait(min(_PATIENCE_S, self._patience_s))
        waited_s = time.monotonic() - began
        if waited_s > _PATIENCE_S / 5:
            self._patience_s -= waited_s

    def _ask(self, token_id: int | None) -> None:
        self.is_ready = False
        try:
            self._process.send(messages.Next(token_id))
        except EOFError:  # the next `wait` finds out the same
            return

    def _check(self) -> None:
        if self._problem is not None:
            raise ConstraintError(self._problem)
