"""Compiles constraints: small ones in this process, the others in processes that can be killed."""

import hashlib
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Listing
from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog

from tokenbus.protocol.wire import errors
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints import messages
from tokenbus.worker.engine.constraints.compiler import ConstraintCompiler, ModelTokens
from tokenbus.worker.engine.constraints.grammar import ConstraintError, is_small, to_problem
from tokenbus.worker.engine.constraints.matcher import Matcher, SequenceMatcher
from tokenbus.worker.engine.constraints.processes import ConstraintProcess, RemoteMatcher, Templates

_MAX_REFUSALS = 1_000
_NUM_PROCESSES = 2
"""Processes that compile at the same time."""


class CompileJob(NamedTuple):
    """A constraint to compile for a sequence, and to follow through the tokens that the sequence already has."""

    seq_no: int
    tenant: str
    constraint: engine_request.Constraint
    token_ids: Listing[int]


class ConstraintRefusal(NamedTuple):
    """Why a constraint can't be compiled."""

    problem: errors.Error
    is_too_costly: bool = False
    """Whether it takes too much time or memory; otherwise it is invalid."""
    is_lasting: bool = False
    """Whether the same constraint would be refused again."""


class CompiledConstraint(NamedTuple):
    """A sequence's constraint, advanced past its existing tokens, or the reason why there is none."""

    seq_no: int
    seconds: float
    result: SequenceMatcher | ConstraintRefusal


class CompileStarted(NamedTuple):
    """The engine itself starts to compile a constraint: if it dies now, this may be why."""

    seq_no: int


class ResumedTokensError(ConstraintError):
    """A sequence's existing tokens violate its constraint."""


def carry_out(job: CompileJob, compile_job: Callable[[], SequenceMatcher]) -> CompiledConstraint:
    """Calls `compile_job`, which may raise ConstraintError."""
    began = time.monotonic()
    result: SequenceMatcher | ConstraintRefusal
    try:
        result = compile_job()
    except ResumedTokensError:
        problem = f"are not what {job.constraint.param} allows"
        result = ConstraintRefusal(errors.invalid_field("resume_from.token_ids", problem).error)
    except ConstraintError as error:
        result = ConstraintRefusal(to_problem(error, job.constraint), error.is_too_costly, is_lasting=True)
    except Exception:  # outermost frame of a constraint: its sequence ends, not the engine
        structlog.get_logger().exception("constraint_failed", seq_no=job.seq_no)
        result = ConstraintRefusal(errors.make_error(errors.Code.INTERNAL))
    return CompiledConstraint(job.seq_no, time.monotonic() - began, result)


Work = TypeVar("Work")


class TenantTurns(Generic[Work]):
    """Tenants take turns in order of arrival: each gets one piece of work done before the first gets its next."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()
        """The work of each tenant; the first tenant is next."""

    def __repr__(self) -> str:
        return f"<TenantTurns, {len(self)} waiting>"

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, tenant: str, work: Work) -> None:
        self._waiting.setdefault(tenant, deque()).append(work)

    def take(self, without: Collection[str] = ()) -> tuple[str, Work] | None:
        """Removes and returns the next work and its tenant; None if only the tenants in `without` have any."""
        tenant = next((tenant for tenant in self._waiting if tenant not in without), None)
        if tenant is None:
            return None
        several = self._waiting.pop(tenant)
        work = several.popleft()
        if several:
            self._waiting[tenant] = several
        return tenant, work

    def remove(self, is_unwanted: Callable[[Work], bool]) -> None:
        """Drops waiting work."""
        for tenant, several in list(self._waiting.items()):
            kept = deque(work for work in several if not is_unwanted(work))
            if kept:
                self._waiting[tenant] = kept
            else:
                del self._waiting[tenant]


class Compiling:
    """A job in a slot. Its process, if it has one, may be killed by another thread."""

    def __init__(self, job: CompileJob) -> None:
        self.job = job
        self._process: ConstraintProcess | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def compiles_in(self, process: ConstraintProcess) -> None:
        """Notes the process that compiles it, or follows it then."""
        with self._lock:
            self._process = process
            if self._is_cancelled:
                process.kill()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.kill()


class CompileSlots:
    """Compiles constraints on up to `num_slots` threads, which the first jobs start, for up to `max_matchers` sequences
    at a time; others wait until one of these is closed.

    Tenants take turns, and each has at most one slot, so that its costly constraints leave the others free.
    `compile_job` may raise ConstraintError. `on_done` is called on this object's threads, for each job that was not
    cancelled, and possibly for one that was; `on_error` with an exception that ends a thread."""

    def __init__(
        self,
        num_slots: int,
        max_matchers: float,
        compile_job: Callable[[Compiling], SequenceMatcher],
        on_done: Callable[[CompileJob, CompiledConstraint], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._num_slots = num_slots
        self._compile_job = compile_job
        self._on_done = on_done
        self._on_error = on_error
        self._turns: TenantTurns[CompileJob] = TenantTurns()
        self._running: dict[str, Compiling] = {}
        """By tenant."""
        self._free_matchers = max_matchers
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def __repr__(self) -> str:
        with self._changed:
            return f"<CompileSlots, {len(self._turns)} waiting, {len(self._running)} compiling>"

    def submit(self, job: CompileJob) -> None:
        """Queues a constraint to be compiled at its tenant's turn."""
        with self._changed:
            self._turns.add(job.tenant, job)
            self._changed.notify()
            if len(self._threads) < self._num_slots:
                thread = threading.Thread(target=self._run, name="constraints", daemon=True)
                self._threads.append(thread)
                thread.start()

    def cancel(self, seq_no: int) -> None:
        """Drops a waiting job, or kills the process, if there is one, of one being compiled."""
        with self._changed:
            self._turns.remove(lambda job: job.seq_no == seq_no)
            for running in self._running.values():
                if running.job.seq_no == seq_no:
                    running.cancel()

    def close(self) -> None:
        """Lets the threads end; the processes that compile are killed."""
        with self._changed:
            self._is_closed = True
            for running in self._running.values():
                running.cancel()
            self._changed.notify_all()

    def matcher_closed(self) -> None:
        """Makes room for another sequence's matcher."""
        with self._changed:
            self._free_matchers += 1
            self._changed.notify()

    def _run(self) -> None:
        try:
            while (running := self._next()) is not None:
                self._carry_out(running)
        except BaseException as error:  # outermost frame: sequences would wait forever
            self._on_error(error)

    def _carry_out(self, running: Compiling) -> None:
        compiled = carry_out(running.job, lambda: self._compile_job(running))
        is_refused = isinstance(compiled.result, ConstraintRefusal)
        with self._changed:
            del self._running[running.job.tenant]
            self._free_matchers += is_refused
            self._changed.notify_all()
        if not (is_refused and running.is_cancelled):
            self._on_done(running.job, compiled)

    def _next(self) -> Compiling | None:
        """Waits for the next job, and for room for its matcher; returns None once closed."""
        with self._changed:
            while not self._is_closed:
                found = self._turns.take(without=self._running) if self._free_matchers else None
                if found is not None:
                    self._free_matchers -= 1
                    running = self._running[found[0]] = Compiling(found[1])
                    return running
                self._changed.wait()
            return None


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
