"""Compiles constraints: small ones in this process, the others in processes that can be killed."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import structlog

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.compile_thread import CompileThread
from tokenbus.worker.engine.constraints.grammars.compiled import (
    CompiledConstraint,
    CompileJob,
    CompileStarted,
    ConstraintRefusal,
)
from tokenbus.worker.engine.constraints.grammars.compiler import ConstraintCompiler
from tokenbus.worker.engine.constraints.grammars.small import is_small
from tokenbus.worker.engine.constraints.grammars.vocabulary import ModelTokens
from tokenbus.worker.engine.constraints.isolated.compile_slots import CompileSlots
from tokenbus.worker.engine.constraints.isolated.templates import Templates

_MAX_REFUSALS = 1_000
Event = CompileStarted | CompiledConstraint | BaseException


class Compilation:
    """Compiles the constraints of one model's sequences. `report` may be called on any thread; an exception means that
    no more constraints will be compiled."""

    def __init__(
        self,
        get_tokens: Callable[[], ModelTokens],
        max_matchers: int,
        report: Callable[[Event], None],
    ) -> None:
        """`get_tokens` is called for the first constraint. At most `max_matchers` sequences have a process that follows
        their constraint."""
        self._report = report
        self._refusals: OrderedDict[bytes, ConstraintRefusal] = OrderedDict()
        """The refusals of the most recently refused constraints, by digest."""
        self._lock = threading.Lock()
        self._inside = CompileThread(lambda: ConstraintCompiler(*get_tokens()), self._done, report)
        self._outside = CompileSlots(Templates(get_tokens), max_matchers, self._done)

    def __repr__(self) -> str:
        return f"<Compilation {self._inside!r} {self._outside!r}>"

    def submit(self, job: CompileJob, *, is_suspect: bool = False) -> None:
        """Submits a constraint for compilation. `is_suspect`: it may have killed an engine."""
        with self._lock:
            refusal = self._refusals.get(_digest(job.constraint))
        if refusal is not None:
            self._report(CompiledConstraint(job.seq_no, 0.0, refusal))
        elif is_small(job.constraint) and not is_suspect:
            self._inside.submit(job)
        else:
            self._outside.submit(job)

    def cancel(self, seq_no: int) -> None:
        """Drops a constraint, and ends a process that compiles it. It may still be reported."""
        self._inside.cancel(seq_no)
        self._outside.cancel(seq_no)

    def close(self) -> None:
        self._inside.close()
        self._outside.close()

    def _done(self, job: CompileJob, compiled: CompiledConstraint) -> None:
        if isinstance(compiled.result, ConstraintRefusal) and compiled.result.is_lasting:
            if compiled.result.is_too_costly:
                size, kind = len(job.constraint.source.encode()), job.constraint.kind
                structlog.get_logger().warning("constraint_too_costly", seq_no=job.seq_no, constraint=kind, bytes=size)
            with self._lock:
                self._refusals[_digest(job.constraint)] = compiled.result
                if len(self._refusals) > _MAX_REFUSALS:
                    self._refusals.popitem(last=False)
        self._report(compiled)


def _digest(constraint: engine_request.Constraint) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(constraint), digest_size=16).digest()
