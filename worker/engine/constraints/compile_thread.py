"""A thread that compiles small constraints, so that no step or other command waits for one."""

import threading
from collections.abc import Callable

from tokenbus.worker.engine.constraints.grammars.compiled import (
    CompiledConstraint,
    CompileJob,
    CompileStarted,
    ResumedTokensError,
    carry_out,
)
from tokenbus.worker.engine.constraints.grammars.compiler import ConstraintCompiler
from tokenbus.worker.engine.constraints.grammars.grammar import ConstraintError
from tokenbus.worker.engine.constraints.grammars.matcher import Matcher
from tokenbus.worker.engine.constraints.grammars.turns import TenantTurns


class CompileThread:
    """Starts with the first constraint, and serves tenants in turn. `on_done` is called on its thread."""

    def __init__(
        self,
        make_compiler: Callable[[], ConstraintCompiler],
        on_done: Callable[[CompileJob, CompiledConstraint], None],
        report: Callable[[CompileStarted | BaseException], None],
    ) -> None:
        """`report` is called with each new compilation started, and with an exception that ends the thread."""
        self._make_compiler = make_compiler
        self._on_done = on_done
        self._report = report
        self._turns: TenantTurns[CompileJob] = TenantTurns()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<CompileThread, {len(self._turns)} waiting>"

    def submit(self, job: CompileJob) -> None:
        """Queues a constraint to be compiled at its tenant's turn."""
        with self._changed:
            self._turns.add(job.tenant, job)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="constraints", daemon=True)
            self._thread.start()

    def cancel(self, seq_no: int) -> None:
        """Drops a waiting constraint; one being compiled is still handed to `on_done`."""
        with self._changed:
            self._turns.remove(lambda job: job.seq_no == seq_no)

    def close(self) -> None:
        """Lets the thread end after its current compilation."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            compiler = self._make_compiler()
            while (job := self._next()) is not None:
                if not compiler.has_compiled(job.constraint):
                    self._report(CompileStarted(job.seq_no))
                self._on_done(job, carry_out(job, lambda job: _compile(compiler, job)))
        except BaseException as error:  # outermost frame: sequences would wait forever
            self._report(error)

    def _next(self) -> CompileJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._turns or self._is_closed)
            found = None if self._is_closed else self._turns.take()
            return None if found is None else found[1]


def _compile(compiler: ConstraintCompiler, job: CompileJob) -> Matcher:
    matcher = compiler.compile(job.constraint)
    try:
        for token_id in job.token_ids:
            matcher.accept(token_id)
    except ConstraintError as error:
        raise ResumedTokensError(str(error)) from error
    return matcher
