"""Compiles constraints: small ones in this process, the others in processes that can be killed."""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import structlog

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints import messages
from tokenbus.worker.engine.constraints.compile_slots import (
    CompiledConstraint,
    CompileJob,
    CompileSlots,
    CompileStarted,
    Compiling,
    ConstraintRefusal,
    ResumedTokensError,
)
from tokenbus.worker.engine.constraints.compiler import ConstraintCompiler
from tokenbus.worker.engine.constraints.grammar import ConstraintError, is_small
from tokenbus.worker.engine.constraints.matcher import Matcher
from tokenbus.worker.engine.constraints.processes import Templates
from tokenbus.worker.engine.constraints.remote_matcher import RemoteMatcher
from tokenbus.worker.engine.constraints.vocabulary import ModelTokens

_MAX_REFUSALS = 1_000
_NUM_PROCESSES = 2
"""Processes that compile at the same time."""
Event = CompileStarted | CompiledConstraint | BaseException


class OwnCompiler:
    """Compiles constraints in this process. `report` is called with each new compilation started."""

    def __init__(self, compiler: ConstraintCompiler, report: Callable[[CompileStarted], None]) -> None:
        self._compiler = compiler
        self._report = report

    def __repr__(self) -> str:
        return f"<OwnCompiler {self._compiler!r}>"

    def compile(self, running: Compiling) -> Matcher:
        """Returns a matcher after the tokens that the sequence has. Raises ConstraintError."""
        job = running.job
        if not self._compiler.has_compiled(job.constraint):
            self._report(CompileStarted(job.seq_no))
        matcher = self._compiler.compile(job.constraint)
        try:
            for token_id in job.token_ids:
                matcher.accept(token_id)
        except ConstraintError as error:
            raise ResumedTokensError(str(error)) from error
        return matcher


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
        self._get_tokens = get_tokens
        self._own_compiler: OwnCompiler | None = None
        self._templates = Templates(get_tokens)
        self._inside = CompileSlots(1, math.inf, self._compile_inside, self._done, report)
        self._outside = CompileSlots(_NUM_PROCESSES, max_matchers, self._compile_outside, self._done, report)

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
        self._templates.close()

    def _compile_inside(self, running: Compiling) -> Matcher:
        if self._own_compiler is None:
            self._own_compiler = OwnCompiler(ConstraintCompiler(self._get_tokens()), self._report)
        return self._own_compiler.compile(running)

    def _compile_outside(self, running: Compiling) -> RemoteMatcher:
        """Raises ConstraintError, and EOFError if there is no nursery."""
        job = running.job
        follower = self._templates.fork(job.constraint, running.compiles_in)
        matcher = RemoteMatcher(follower, self._templates.vocab_size, self._outside.matcher_closed)
        try:
            follower.send(messages.Begin(list(job.token_ids)))
            matcher.wait(None)
            matcher.forced()
        except (ConstraintError, EOFError) as error:
            follower.close()
            raise (ResumedTokensError if job.token_ids else ConstraintError)(str(error)) from error
        return matcher

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
