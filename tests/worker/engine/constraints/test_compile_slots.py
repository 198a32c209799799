"""Constraints are compiled on a thread, one tenant's after another's."""

import math
import queue
import threading

import pytest

from tests.support.tiny_vocabulary import END, TOKENS, constraint, encode
from tokenbus.protocol.wire import errors
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.compilation import (
    CompiledConstraint,
    CompileJob,
    CompileSlots,
    CompileStarted,
    Compiling,
    ConstraintRefusal,
    OwnCompiler,
)
from tokenbus.worker.engine.constraints.compiler import ConstraintCompiler, ModelTokens
from tokenbus.worker.engine.constraints.matcher import Matcher


class Gated(ConstraintCompiler):
    """Compiles nothing until its gate opens; notes in which order it was asked."""

    def __init__(self, gate: threading.Event, failure: Exception | None = None) -> None:
        super().__init__(ModelTokens(TOKENS, {END}, encode))
        self._gate = gate
        self._failure = failure

    def compile(self, constraint: engine_request.Constraint) -> Matcher:
        assert self._gate.wait(10)
        if self._failure is not None:
            raise self._failure
        return super().compile(constraint)


class Story:
    def __init__(self, failure: Exception | None = None) -> None:
        self.gate = threading.Event()
        self.done: queue.SimpleQueue[CompiledConstraint] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[CompileStarted | BaseException] = queue.SimpleQueue()
        compiler = OwnCompiler(Gated(self.gate, failure), self.reports.put)
        self.slots = CompileSlots(
            1, math.inf, compiler.compile, lambda _, compiled: self.done.put(compiled), self.reports.put
        )

    def submit(self, seq_no: int, tenant: str = "a", source: str = "a+", after: str = "") -> None:
        self.slots.submit(CompileJob(seq_no, tenant, constraint("regex", source), encode(after)))

    def take(self) -> CompiledConstraint:
        return self.done.get(timeout=10)

    def refused(self) -> errors.Error:
        result = self.take().result
        assert isinstance(result, ConstraintRefusal)
        return result.problem


@pytest.fixture
def story() -> Story:
    return Story()


def test_tenants_take_turns(story: Story) -> None:
    story.submit(0)  # keeps the thread busy
    while repr(story.slots) != "<CompileSlots, 0 waiting, 1 compiling>":
        pass
    for number, tenant in enumerate("aaabbc", start=1):
        story.submit(number, tenant)
    story.gate.set()
    assert [story.take().seq_no for _ in range(7)] == [0, 1, 4, 6, 2, 5, 3]


def test_what_is_cancelled_while_it_waits_is_not_compiled(story: Story) -> None:
    story.submit(0)
    while repr(story.slots) != "<CompileSlots, 0 waiting, 1 compiling>":
        pass
    for number, tenant in enumerate("aab", start=1):
        story.submit(number, tenant)
    story.slots.cancel(1)
    story.slots.cancel(3)
    story.slots.cancel(99)
    story.gate.set()
    assert [story.take().seq_no for _ in range(2)] == [0, 2]


def test_a_matcher_stands_behind_the_tokens_that_a_sequence_has(story: Story) -> None:
    story.gate.set()
    story.submit(1, source="[ab]{3}x", after="ab")
    result = story.take().result
    assert isinstance(result, Matcher)
    result.accept(encode("a")[0])
    assert result.accept_forced(1) == encode("x")


def test_a_wrong_constraint_is_an_error_that_names_its_field(story: Story) -> None:
    story.gate.set()
    story.submit(1, source="(a")
    result = story.refused()
    assert (result.code, result.param) == (errors.Code.INVALID_REQUEST, "grammar")
    assert result.message.startswith("grammar: ")


def test_tokens_that_the_constraint_does_not_allow_are_an_error_of_their_own(story: Story) -> None:
    story.gate.set()
    story.submit(1, after="ab")
    result = story.refused()
    assert (result.code, result.param) == (errors.Code.INVALID_REQUEST, "resume_from.token_ids")


def test_a_bug_ends_one_sequence_and_not_the_thread() -> None:
    story = Story(RuntimeError("a bug"))
    story.gate.set()
    for number in (1, 2):
        story.submit(number)
        assert story.refused().code is errors.Code.INTERNAL


def test_a_thread_that_ends_says_so() -> None:
    def fail(_: Compiling) -> Matcher:
        raise SystemExit

    reports: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    slots = CompileSlots(1, math.inf, fail, lambda *_: None, reports.put)
    slots.submit(CompileJob(1, "a", constraint("regex", "a"), []))
    assert isinstance(reports.get(timeout=10), SystemExit)


def test_each_start_is_reported_so_that_an_engine_that_dies_of_it_is_known_to(story: Story) -> None:
    story.submit(7)
    assert story.reports.get(timeout=10) == CompileStarted(7)
    story.gate.set()
    story.submit(8)
    assert [story.take().seq_no for _ in range(2)] == [7, 8]
    assert story.reports.empty(), "what is known already ends no engine"
