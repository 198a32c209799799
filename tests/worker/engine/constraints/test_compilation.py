"""A constraint that is not small is compiled and followed in processes that can be ended, and harms only its own
sequence."""

import os
import queue
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.tiny_vocabulary import END, OTHER_END, TOKENS, choice, compiler, constraint, decode, encode, walk
from tokenbus.protocol.wire import errors
from tokenbus.worker.engine.constraints import processes
from tokenbus.worker.engine.constraints.compilation import (
    Compilation,
    CompiledConstraint,
    CompileJob,
    CompileStarted,
    ConstraintRefusal,
    Event,
)
from tokenbus.worker.engine.constraints.compiler import ModelTokens
from tokenbus.worker.engine.constraints.grammar import ConstraintError
from tokenbus.worker.engine.constraints.matcher import Matcher, SequenceMatcher
from tokenbus.worker.engine.constraints.processes import ConstraintProcess, RemoteMatcher, Templates

pytestmark = pytest.mark.usefixtures("executed")
ENDLESS = ".?" * 8_000
"""A regex that would take half a minute and gigabytes."""
LARGE = "|".join(f"word{number}" for number in range(200))
"""A harmless one that is not small."""


def endless(number: int) -> str:
    return f"{number}{ENDLESS}"


class Story:
    """A compilation and what it reports."""

    def __init__(self, max_matchers: int = 8) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.compilation = Compilation(
            lambda: ModelTokens(TOKENS, {END, OTHER_END}, encode), max_matchers, self.events.put
        )
        self._last = 0
        self._matchers: list[SequenceMatcher] = []

    def close(self) -> None:
        for matcher in self._matchers:
            matcher.close()
        self.compilation.close()

    def submit(self, source: str, tenant: str = "acme", after: str = "", *, is_suspect: bool = False) -> int:
        self._last += 1
        job = CompileJob(self._last, tenant, constraint("regex", source), encode(after))
        self.compilation.submit(job, is_suspect=is_suspect)
        return self._last

    def next(self) -> CompiledConstraint:
        while isinstance(event := self.events.get(timeout=60), CompileStarted):
            pass
        assert isinstance(event, CompiledConstraint), event
        if not isinstance(event.result, ConstraintRefusal):
            self._matchers.append(event.result)
        return event

    def matcher(self, source: str, after: str = "") -> RemoteMatcher:
        self.submit(source, after=after, is_suspect=True)
        result = self.next().result
        assert isinstance(result, RemoteMatcher), result
        return result

    def refusal(self) -> ConstraintRefusal:
        result = self.next().result
        assert isinstance(result, ConstraintRefusal), result
        return result


@pytest.fixture
def story() -> Iterator[Story]:
    one = Story()
    yield one
    one.close()


def ready(matcher: RemoteMatcher) -> RemoteMatcher:
    matcher.wait(None)
    return matcher


def follow(matcher: RemoteMatcher, text: str) -> None:
    for letter in text:
        ready(matcher).accept(*encode(letter))
    ready(matcher).forced()


def process_ids() -> set[int]:
    """The processes of all nurseries on this machine that this one has started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
        except OSError:
            continue
        if b"constraints.nursery" in command and f"MARK_OF_A_TEST={os.getpid()}".encode() in environment:
            found.add(int(path.name))
    return found


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK_OF_A_TEST", str(os.getpid()))


def until(is_true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < limit
        time.sleep(0.01)


# What is compiled there is the same


@pytest.mark.parametrize("source", ["[xyz]{1,4}=[0-9]{2}", "(name|true|x{2,40}){1,3}", "xyz" * 60, LARGE])
@pytest.mark.parametrize("seed", range(3))
def test_an_output_is_the_same_as_in_the_engine(story: Story, source: str, seed: int) -> None:
    tokens = walk(compiler().compile(constraint("regex", source)), choice(seed))
    matcher, taken = story.matcher(source), []
    while not taken or taken[-1] not in (END, OTHER_END):
        token_id = ready(matcher).forced()
        if token_id is None:
            allowed = matcher.allowed()
            assert allowed[tokens[len(taken)]]
            token_id = choice(seed)(taken, [n for n, is_allowed in enumerate(allowed) if is_allowed])
        taken.append(token_id)
        if token_id not in (END, OTHER_END):
            matcher.accept(token_id)
            taken += ready(matcher).accept_forced(len(taken) % 40)
    assert decode(taken) == decode(tokens)
    matcher.close()


def test_a_sequence_that_has_tokens_goes_on_behind_them(story: Story) -> None:
    matcher = story.matcher("[ab]{3}x", after="ab")
    matcher.accept(encode("a")[0])
    assert decode(ready(matcher).accept_forced(1)) == "x"


def test_tokens_that_it_does_not_allow_are_an_error_of_their_own(story: Story) -> None:
    story.submit("[ab]{3}x", after="xx", is_suspect=True)
    refusal = story.refusal()
    assert (refusal.problem.param, refusal.is_lasting) == ("resume_from.token_ids", False)


def test_a_wrong_constraint_is_refused_with_what_is_wrong(story: Story) -> None:
    story.submit("(a", is_suspect=True)
    refusal = story.refusal()
    assert (refusal.problem.code, refusal.is_too_costly) == (errors.Code.INVALID_REQUEST, False)
    assert "unclosed group" in refusal.problem.message


def test_a_small_one_stays_in_the_engine_unless_an_engine_may_have_died_of_it(story: Story) -> None:
    story.submit("a+b")
    assert isinstance(story.events.get(timeout=60), CompileStarted)
    assert isinstance(story.next().result, Matcher)
    story.submit("a+b", is_suspect=True)
    assert isinstance(story.next().result, RemoteMatcher)


# What is too costly


def test_one_that_takes_too_much_is_refused_and_those_of_others_do_not_wait_for_it(story: Story) -> None:
    costly = [story.submit(endless(number), tenant="hostile") for number in range(2)]
    small, large = story.submit("a+b", tenant="other"), story.submit(LARGE, tenant="other")
    found = [story.next() for _ in range(4)]
    assert {one.seq_no for one in found[:2]} == {small, large}
    assert [one.seq_no for one in found[2:]] == costly
    for one in found[2:]:
        assert isinstance(one.result, ConstraintRefusal)
        assert one.result.is_too_costly
        assert "too" in one.result.problem.message or "takes more than" in one.result.problem.message


def test_a_refusal_is_remembered(story: Story) -> None:
    for source in ("(a" + "a" * 600, ENDLESS):
        story.submit(source)
        first = story.refusal()
        story.submit(source, tenant="other")
        again = story.next()
        assert (again.seconds, again.result) == (0.0, first)


def test_a_cancel_ends_the_work_and_leaves_no_process(story: Story) -> None:
    story.matcher(LARGE).close()
    before = process_ids()
    number = story.submit(ENDLESS)
    until(lambda: bool(process_ids() - before))
    story.compilation.cancel(number)
    story.submit("x" * 600)
    assert isinstance(story.next().result, RemoteMatcher), "the slot is free, and nothing was said of the cancelled one"


def test_what_is_cancelled_is_not_remembered_as_refused(story: Story) -> None:
    for number in range(10):
        source = f"{number}|{LARGE}"
        story.compilation.cancel(story.submit(source))
        again = story.submit(source)
        while (found := story.next()).seq_no != again:
            assert isinstance(found.result, RemoteMatcher), "it was done before the cancel"
        assert isinstance(found.result, RemoteMatcher)
        found.result.close()


def test_a_cancel_ends_the_follower_of_one_sequence_and_not_the_process_that_others_are_forked_from() -> None:
    templates = Templates(lambda: ModelTokens(TOKENS, {END, OTHER_END}, encode))
    seen: list[ConstraintProcess] = []
    try:
        first = templates.fork(constraint("regex", LARGE), seen.append)
        assert len(seen) == 2, "one has compiled it, and one follows it"
        seen[-1].kill()
        with pytest.raises(EOFError):
            first.receive()
        second = templates.fork(constraint("regex", LARGE), seen.append)
        assert seen == [seen[0], first, second], "it was not compiled again"
        for one in (first, second):
            one.close()
    finally:
        templates.close()


@pytest.mark.parametrize("dying", ["template", "nursery"])
def test_a_process_that_ends_before_it_forks_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch, dying: str) -> None:
    templates = Templates(lambda: ModelTokens(TOKENS, {END, OTHER_END}, encode))
    templates.fork(constraint("regex", "x" * 600), lambda _: None).close()
    before = len(os.listdir("/proc/self/fd"))

    def end(_: ConstraintProcess) -> ConstraintProcess:
        raise EOFError

    with monkeypatch.context() as patched:
        patched.setattr(processes._Template if dying == "template" else ConstraintProcess, "fork", end)
        with pytest.raises(EOFError):
            templates.fork(constraint("regex", LARGE), lambda _: None)
    after = len(os.listdir("/proc/self/fd"))
    templates.close()
    assert after == before


def test_when_it_is_closed_no_process_is_left(story: Story) -> None:
    story.matcher(LARGE).close()
    story.submit(ENDLESS)
    story.compilation.close()
    until(lambda: not process_ids())


# Processes that die


def test_a_nursery_that_was_killed_is_replaced(story: Story) -> None:
    matcher = story.matcher("[ab]{9}x")
    for process_id in process_ids():
        os.kill(process_id, signal.SIGKILL)
    with pytest.raises(ConstraintError, match="too much time or memory"):  # its process was among them
        follow(matcher, "abababab")
    assert story.matcher(LARGE).is_ready


def test_one_whose_process_dies_ends_and_others_go_on(story: Story) -> None:
    first = story.matcher("[ab]{9}x")
    before = process_ids()
    second = story.matcher("[ab]{9}x")
    (follower,) = process_ids() - before
    os.kill(follower, signal.SIGKILL)
    with pytest.raises(ConstraintError):
        follow(second, "abababab")
    follow(first, "abababab")
    assert ready(first).allowed()[encode("b")[0]]


# Bounds


def test_the_next_waits_for_a_matcher_to_be_closed_where_there_are_enough() -> None:
    story = Story(max_matchers=1)
    first = story.matcher(LARGE)
    story.submit(LARGE)
    story.submit("a+")
    small = story.next()
    assert isinstance(small.result, Matcher)
    first.close()
    assert isinstance(story.next().result, RemoteMatcher)
    story.close()


def test_a_step_waits_a_moment_for_a_process_and_then_goes_on_without_it(story: Story) -> None:
    before = process_ids()
    matcher = story.matcher("[ab]{9000}x")
    processes = process_ids() - before
    for process_id in processes:
        os.kill(process_id, signal.SIGSTOP)
    matcher.accept(encode("a")[0])
    waited = []
    for _ in range(200):
        began = time.thread_time(), time.monotonic()
        assert matcher.accept_forced(32) == []
        waited.append(time.monotonic() - began[1])
    assert not matcher.is_ready
    assert sum(waited[-20:]) < sum(waited[:20]), "its patience is used up"
    for process_id in processes:
        os.kill(process_id, signal.SIGCONT)
    assert ready(matcher).allowed()[encode("b")[0]]


def test_random_orders_of_tenants_are_all_answered(story: Story) -> None:
    rng = random.Random(4)
    numbers = set()
    for _ in range(20):
        source = rng.choice(["a+", "(a", LARGE, "y" * 700, "(" + "b" * 700])
        numbers.add(story.submit(source, tenant=rng.choice("abc")))
    seen = set()
    while seen != numbers:
        one = story.next()
        seen.add(one.seq_no)
        if not isinstance(one.result, ConstraintRefusal):
            one.result.close()
