"""Compiles constraints in processes, and keeps those processes for reuse."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable

import structlog

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.grammars.grammar import ConstraintError
from tokenbus.worker.engine.constraints.grammars.vocabulary import ModelTokens
from tokenbus.worker.engine.constraints.isolated import messages
from tokenbus.worker.engine.constraints.isolated.processes import ConstraintProcess, Nursery

_MAX_KEPT = 16
_MAX_KEPT_BYTES = 256 << 20
_BASE_BYTES = 8 << 20
"""A process has about this much unshared memory, besides what it has compiled."""
_TOO_COSTLY = "takes more than 2 s of CPU time or 192 MiB to compile: make it smaller"

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
        which may be killed.

        Raises ConstraintError, and EOFError if no process can be forked to compile it."""
        key = (constraint.kind, constraint.source, constraint.preamble)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is not None:
            with contextlib.suppress(EOFError):
                return found.fork()
        template = self._compile(constraint, on_process)
        child = template.fork()
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
