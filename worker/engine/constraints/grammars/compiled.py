"""Constraints to be compiled, and the outcomes."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import NamedTuple

import structlog

from tokenbus.protocol.wire import errors
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.grammars.grammar import ConstraintError, to_problem
from tokenbus.worker.engine.constraints.grammars.matcher import SequenceMatcher


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
