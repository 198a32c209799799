"""Threads that compile constraints in separate processes, a few at a time."""

import functools
import threading
from collections.abc import Callable

from tokenbus.worker.engine.constraints.grammars.compiled import (
    CompiledConstraint,
    CompileJob,
    ConstraintRefusal,
    ResumedTokensError,
    carry_out,
)
from tokenbus.worker.engine.constraints.grammars.grammar import ConstraintError
from tokenbus.worker.engine.constraints.grammars.turns import TenantTurns
from tokenbus.worker.engine.constraints.isolated import messages
from tokenbus.worker.engine.constraints.isolated.processes import ConstraintProcess
from tokenbus.worker.engine.constraints.isolated.remote_matcher import RemoteMatcher
from tokenbus.worker.engine.constraints.isolated.templates import Templates

_NUM_SLOTS = 2
"""A tenant has at most one, so that its costly constraints leave one for all others."""


class _Running:
    """A job in a slot. Its process may be killed by another thread."""

    def __init__(self, job: CompileJob) -> None:
        self.job = job
        self._process: ConstraintProcess | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def compiles_in(self, process: ConstraintProcess) -> None:
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
    """Compiles constraints for up to `max_matchers` sequences at a time; others wait until one of these is closed.

    `on_done` is called on this object's threads, for each job that was not cancelled, and possibly for one that was."""

    def __init__(
        self,
        templates: Templates,
        max_matchers: int,
        on_done: Callable[[CompileJob, CompiledConstraint], None],
    ) -> None:
        self._templates = templates
        self._on_done = on_done
        self._turns: TenantTurns[CompileJob] = TenantTurns()
        self._running: dict[str, _Running] = {}
        """By tenant: each has at most one."""
        self._free_matchers = max_matchers
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<CompileSlots, {len(self._turns)} waiting, {len(self._running)} compiling>"

    def submit(self, job: CompileJob) -> None:
        with self._changed:
            self._turns.add(job.tenant, job)
            self._changed.notify()
            if len(self._threads) < _NUM_SLOTS:
                thread = threading.Thread(target=self._run, name="isolated-constraints", daemon=True)
                self._threads.append(thread)
                thread.start()

    def cancel(self, seq_no: int) -> None:
        """Drops a waiting job, or kills the process of one being compiled."""
        with self._changed:
            self._turns.remove(lambda job: job.seq_no == seq_no)
            for running in self._running.values():
                if running.job.seq_no == seq_no:
                    running.cancel()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for running in self._running.values():
                running.cancel()
            self._changed.notify_all()
        self._templates.close()

    def _run(self) -> None:
        while (running := self._next()) is not None:
            compiled = carry_out(running.job, functools.partial(self._compile, running))
            is_refused = isinstance(compiled.result, ConstraintRefusal)
            with self._changed:
                del self._running[running.job.tenant]
                self._free_matchers += is_refused
                self._changed.notify_all()
            if not (is_refused and running.is_cancelled):
                self._on_done(running.job, compiled)

    def _next(self) -> _Running | None:
        """Waits for the next job, and for room for its matcher; returns None once closed."""
        with self._changed:
            while not self._is_closed:
                found = self._turns.take(without=self._running) if self._free_matchers else None
                if found is not None:
                    self._free_matchers -= 1
                    running = self._running[found[0]] = _Running(found[1])
                    return running
                self._changed.wait()
            return None

    def _compile(self, running: _Running, job: CompileJob) -> RemoteMatcher:
        """Raises ConstraintError, and EOFError if there is no nursery."""
        follower = self._templates.fork(job.constraint, running.compiles_in)
        matcher = RemoteMatcher(follower, self._templates.vocab_size, self._matcher_closed)
        try:
            follower.send(messages.Begin(list(job.token_ids)))
            matcher.wait(None)
            matcher.forced()
        except (ConstraintError, EOFError) as error:
            follower.close()
            raise (ResumedTokensError if job.token_ids else ConstraintError)(str(error)) from error
        return matcher

    def _matcher_closed(self) -> None:
        with self._changed:
            self._free_matchers += 1
            self._changed.notify()
