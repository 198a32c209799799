"""The step loop starts a constrained sequence once its constraint is compiled, and others go on meanwhile."""

import queue
import threading
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.arithmetic import ArithmeticRunner
from tokenbus.protocol.wire import block_hash, errors
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.process.loop import Inbox, StepLoop
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason

Reports = queue.SimpleQueue[ipc.StepReport | ipc.StepIsolated | ipc.ConstraintCompiled | ipc.PoolResult]


class GatedRunner(ArithmeticRunner):
    """Its tokenizer, with which a constraint's vocabulary is made, waits for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.compile_gate = threading.Event()

    def encode(self, text: str) -> list[int]:
        assert self.compile_gate.wait(10)
        return super().encode(text)


def add(seq_no: int, source: str | None = None, sampled: tuple[int, ...] = ()) -> ipc.Add:
    constraint = None
    if source is not None:
        constraint = engine_request.Constraint(kind=engine_request.ConstraintKind.REGEX, source=source, param="regex")
    sampling = engine_request.Sampling(max_tokens=4, ignore_eos=source is None)
    token_ids = block_hash.pack_token_ids([5, 6, *sampled])
    return ipc.Add(seq_no, token_ids, sampling, num_sampled=len(sampled), constraint=constraint, tenant="acme")


class Running:
    """A loop in a thread."""

    def __init__(self) -> None:
        self.runner = GatedRunner()
        self.inbox: Inbox = queue.SimpleQueue()
        self.reports: Reports = queue.SimpleQueue()
        loop = StepLoop(self.runner, self.inbox, self.reports.put, step_target_s=0.05, debug=True)
        self._thread = threading.Thread(target=loop.run)
        self._thread.start()

    def until(self, seq_no: int) -> list[ipc.ConstraintCompiled | ipc.SequenceOutput | int]:
        """The reports about sequences until this one has ended: its number stands for its start."""
        seen: list[ipc.ConstraintCompiled | ipc.SequenceOutput | int] = []
        while True:
            report = self.reports.get(timeout=10)
            match report:
                case ipc.ConstraintCompiled():
                    seen.append(msgspec.structs.replace(report, seconds=0.0))
                    if report.seq_no == seq_no and report.problem is not None:
                        return seen
                case ipc.StepReport():
                    seen += [*report.started, *report.outputs]
                    if any(one.seq_no == seq_no and one.finish_reason is not None for one in report.outputs):
                        return seen

    def close(self) -> None:
        self.runner.compile_gate.set()
        self.inbox.put(None)
        self._thread.join(10)


@pytest.fixture
def running() -> Iterator[Running]:
    one = Running()
    yield one
    one.close()


def test_a_sequence_starts_once_its_constraint_is_compiled(running: Running) -> None:
    running.inbox.put(add(1, "a+"))
    running.runner.compile_gate.set()
    compiled, started, *_ = running.until(1)
    assert (compiled, started) == (ipc.ConstraintCompiled(1, 0.0), 1)


def test_others_go_on_while_one_is_compiled(running: Running) -> None:
    running.inbox.put(add(1, "a+"))
    running.inbox.put(add(2))
    assert running.until(2)[0] == 2
    running.runner.compile_gate.set()
    assert ipc.ConstraintCompiled(1, 0.0) in running.until(1)


def test_a_constraint_that_cannot_be_compiled_is_reported_and_the_sequence_never_starts(running: Running) -> None:
    running.runner.compile_gate.set()
    running.inbox.put(add(1, "(a"))
    (failed,) = running.until(1)
    assert isinstance(failed, ipc.ConstraintCompiled)
    assert failed.problem is not None
    assert (failed.problem.code, failed.problem.param) == (errors.Code.INVALID_REQUEST, "regex")
    running.inbox.put(add(2))
    assert running.until(2)[0] == 2


def test_an_abort_while_it_is_compiled_ends_it_at_once_and_nothing_follows(running: Running) -> None:
    for number in (1, 2):
        running.inbox.put(add(number, "a+"))
        running.inbox.put(ipc.Abort(number))
        assert running.until(number) == [ipc.SequenceOutput(number, [], EngineFinishReason.ABORTED)]
    running.runner.compile_gate.set()
    running.inbox.put(add(3, "b+"))
    compiled, started, *_ = running.until(3)
    assert (compiled, started) == (ipc.ConstraintCompiled(3, 0.0), 3)


def test_a_sequence_that_has_tokens_goes_on_behind_them(running: Running) -> None:
    running.runner.compile_gate.set()
    letter = 1 + ord("a") - 0x20
    running.inbox.put(add(1, "a+", (letter, letter)))
    assert running.until(1)[:2] == [ipc.ConstraintCompiled(1, 0.0), 1]
    running.inbox.put(add(2, "b+", (letter,)))
    (failed,) = running.until(2)
    assert isinstance(failed, ipc.ConstraintCompiled)
    assert failed.problem is not None
    assert failed.problem.param == "resume_from.token_ids"
