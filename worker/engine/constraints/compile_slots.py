"""Threads that compile constraints, a few at a time, so that no step or other command waits for one."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Listing
from typing import Generic, NamedTuple, TypeVar

import structlog

from tokenbus.protocol.wire import errors
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.grammar import ConstraintError, to_problem
from tokenbus.worker.engine.constraints.matcher import SequenceMatcher
from tokenbus.worker.engine.constraints.processes import ConstraintProcess


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
        """Notes the process that compiles it."""
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
