"""A thread that compiles constraints, so that neither a step nor another command waits for one.

Tenants take turns: each has one constraint compiled, in the order of their arrival, before the first has its next."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import NamedTuple

import structlog

from tokenbus.protocol.wire import errors
from tokenbus.worker import engine_request
from tokenbus.worker.engine.constraints.compiler import ConstraintCompiler
from tokenbus.worker.engine.constraints.grammar import ConstraintError, to_problem
from tokenbus.worker.engine.constraints.matcher import Matcher


class CompiledConstraint(NamedTuple):
    """The constraint of a sequence, behind the tokens that it has, or the reason why there is none."""

    seq_no: int
    seconds: float
    result: Matcher | errors.Error


class _Job(NamedTuple):
    seq_no: int
    constraint: engine_request.Constraint
    token_ids: Listing[int]


class CompileThread:
    """Starts with the first constraint. `on_done` is called on its thread."""

    def __init__(
        self,
        make_compiler: Callable[[], ConstraintCompiler],
        on_done: Callable[[CompiledConstraint | BaseException], None],
    ) -> None:
        self._make_compiler = make_compiler
        self._on_done = on_done
        self._jobs: OrderedDict[str, deque[_Job]] = OrderedDict()
        """Those of each tenant; the first tenant is the next."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<CompileThread, {sum(map(len, self._jobs.values()))} waiting>"

    def submit(self, seq_no: int, tenant: str, constraint: engine_request.Constraint, token_ids: Listing[int]) -> None:
        """Compiles a constraint when its tenant's turn comes, and follows it through `token_ids`."""
        with self._changed:
            self._jobs.setdefault(tenant, deque()).append(_Job(seq_no, constraint, token_ids))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="constraints", daemon=True)
            self._thread.start()

    def cancel(self, seq_no: int) -> None:
        """Forgets a constraint that waits; one that is being compiled is still handed to `on_done`."""
        with self._changed:
            for tenant, jobs in list(self._jobs.items()):
                kept = deque(job for job in jobs if job.seq_no != seq_no)
                if kept:
                    self._jobs[tenant] = kept
                else:
                    del self._jobs[tenant]

    def _run(self) -> None:
        try:
            compiler = self._make_compiler()
            while True:
                job = self._next()
                began = time.monotonic()
                result = _compile(compiler, job)
                self._on_done(CompiledConstraint(job.seq_no, time.monotonic() - began, result))
        except BaseException as error:  # outermost frame: sequences would wait for ever
            self._on_done(error)

    def _next(self) -> _Job:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs)
            tenant, jobs = self._jobs.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._jobs[tenant] = jobs
            return job


def _compile(compiler: ConstraintCompiler, job: _Job) -> Matcher | errors.Error:
    try:
        matcher = compiler.compile(job.constraint)
    except ConstraintError as error:
        return to_problem(error, job.constraint)
    except Exception:  # outermost frame of a constraint: its sequence ends, and not the engine
        structlog.get_logger().exception("constraint_failed", seq_no=job.seq_no)
        return errors.make_error(errors.Code.INTERNAL)
    try:
        for token_id in job.token_ids:
            matcher.accept(token_id)
    except ConstraintError:
        return errors.invalid_field("resume_from.token_ids", f"are not what {job.constraint.param} allows").error
    return matcher
