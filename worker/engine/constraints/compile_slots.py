"""Threads that compile constraints, a few at a time, so that no step or other command waits for one."""

import threading
from collections.abc import Callable

from tokenbus.worker.engine.constraints.grammars.compiled import (
    CompiledConstraint,
    CompileJob,
    ConstraintRefusal,
    carry_out,
)
from tokenbus.worker.engine.constraints.grammars.matcher import SequenceMatcher
from tokenbus.worker.engine.constraints.grammars.turns import TenantTurns
from tokenbus.worker.engine.constraints.isolated.processes import ConstraintProcess


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
