"""The step loop carries out commands, survives errors that belong to one sequence, and waits when it is idle."""

import queue
import sys
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arithmetic import END_TOKEN, ArithmeticRunner, exchanging, make_config
from tests.support.block_hashes import block_hashes
from tests.support.reasoning_vocabulary import KNOWN, ReasoningVocabulary
from tokenbus.protocol.wire import block_hash
from tokenbus.worker.chat_format.reasoning_budget import ReasoningBudget
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import DeviceError, InsufficientMemoryError
from tokenbus.worker.contract.engine_settings import SchedulerSettings
from tokenbus.worker.engine.process import ipc, resumed_tokens
from tokenbus.worker.engine.process.loop import StepLoop
from tokenbus.worker.engine.scheduling.plan import Outcome, StepPlan
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason

Command = ipc.Add | ipc.Abort | ipc.ClearCache | ipc.ExpectTurn | None


class Inbox(queue.SimpleQueue[Command]):
    """An inbox that returns None when the loop would wait for ever, so that a test's own thread can run the loop."""

    def __init__(self, *commands: Command) -> None:
        super().__init__()
        self.num_waits = 0
        for command in commands:
            self.put(command)

    def get(self, block: bool = True, timeout: float | None = None) -> Command:
        assert block, "the loop polls"
        assert timeout is None, "the loop polls"
        if self.empty():
            self.num_waits += 1
            return None
        return super().get()


class Story(NamedTuple):
    """The reports of a loop until it had nothing more to do."""

    reports: list[ipc.StepReport]
    inbox: Inbox
    isolated: list[tuple[int, int]]
    """The number of reports before each announcement of isolated steps, and its sequence."""

    @property
    def outputs(self) -> list[ipc.SequenceOutput]:
        return [output for report in self.reports for output in report.outputs]

    def tokens(self, seq_no: int) -> list[int]:
        return [token_id for o in self.outputs if o.seq_no == seq_no for token_id in o.token_ids]

    def ends(self) -> dict[int, EngineFinishReason]:
        """Fails for a sequence that ends twice or goes on after its end."""
        ends: dict[int, EngineFinishReason] = {}
        for output in self.outputs:
            assert output.seq_no not in ends, output
            if output.finish_reason is not None:
                ends[output.seq_no] = output.finish_reason
        return ends


def add(seq_no: int, num_prompt: int = 3, max_tokens: int = 6, **sampling: object) -> ipc.Add:
    fields: dict[str, object] = {"max_tokens": max_tokens, "ignore_eos": True} | sampling
    token_ids = [1 + (7 * seq_no + 3 * place) % 90 for place in range(num_prompt)]
    return ipc.Add(seq_no, block_hash.pack_token_ids(token_ids), engine_request.Sampling(**fields))  # type: ignore[arg-type]


def shared_add(seq_no: int, num_prompt: int, max_tokens: int = 6) -> ipc.Add:
    """A command for sequences that share their prompts' prefixes."""
    return msgspec.structs.replace(add(1, num_prompt, max_tokens), seq_no=seq_no, domain=("acme", ""))


def run(
    *commands: Command,
    runner: ArithmeticRunner | None = None,
    then: Callable[[ipc.StepReport, Inbox], None] = lambda report, inbox: None,
    settings: SchedulerSettings | None = None,
) -> Story:
    """Runs a loop in this thread until it is idle; `then` is called after each report and may send commands."""
    story = Story([], Inbox(*commands), [])

    def report(said: ipc.StepReport | ipc.StepIsolated) -> None:
        if isinstance(said, ipc.StepIsolated):
            story.isolated.append((len(story.reports), said.seq_no))
            return
        story.reports.append(said)
        then(said, story.inbox)

    StepLoop(runner or ArithmeticRunner(), story.inbox, report, 0.05, settings, debug=True).run()
    return story


def test_a_sequence_is_reported_as_started_then_has_a_token_a_step_and_ends_once() -> None:
    story = run(add(1, max_tokens=3))
    assert [report.started for report in story.reports] == [[1], [], [], []]
    assert [[output.seq_no for output in report.outputs] for report in story.reports] == [[], [1], [1], [1]]
    assert [output.finish_reason for output in story.outputs] == [None, None, EngineFinishReason.LENGTH]


def test_every_report_carries_the_load_after_it() -> None:
    story = run(add(1, max_tokens=2))
    assert [report.load.running for report in story.reports] == [1, 1, 0]
    assert (story.reports[-1].load.used_blocks, story.reports[-1].load.free_blocks) == (0, 64)


def test_the_stats_of_steps_count_preemptions_and_what_moves_between_device_and_host_memory() -> None:
    """Two sequences of which one token is expected use four blocks each, of 100 bytes; there are four."""
    config = make_config(kv_block_size=4, total_kv_blocks=4, host_kv_blocks=4, kv_bytes=400)
    commands = [msgspec.structs.replace(add(number, 7, 9), domain=("acme", "")) for number in (1, 2)]
    story = run(*commands, runner=ArithmeticRunner(config), settings=SchedulerSettings(expected_tokens=1))
    stats = [report.stats for report in story.reports if report.stats is not None]
    assert sum(one.preemptions for one in stats) == 1
    assert (sum(one.restored_tokens for one in stats), sum(one.recomputed_tokens for one in stats)) == (8, 0)
    assert (sum(one.offloaded_bytes for one in stats), sum(one.onloaded_bytes for one in stats)) == (600, 200)
    assert set(story.ends().values()) == {EngineFinishReason.LENGTH}


def resumed_with_budget(seq_no: int, num_sampled: int) -> ipc.Add:
    """A command for a sequence that already has tokens, which its reasoning budget has to read."""
    parsing = engine_request.OutputParsing(generation_prompt="<think>")
    limit = engine_request.ReasoningLimit(max_tokens=100_000, parsing=parsing)
    token_ids = block_hash.pack_token_ids([5] * (3 + num_sampled))
    sampling = engine_request.Sampling(max_tokens=num_sampled + 2, ignore_eos=True)
    return ipc.Add(seq_no, token_ids, sampling, num_sampled=num_sampled, reasoning_limit=limit)


@pytest.fixture
def closing_runner() -> ArithmeticRunner:
    runner = ArithmeticRunner(make_config(total_kv_blocks=4_096, context_length=40_000))
    runner.reasoning_closer = ReasoningVocabulary(KNOWN["hermes"]).closer
    return runner


def test_tokens_that_a_sequence_already_has_are_read_between_the_steps_of_others(
    closing_runner: ArithmeticRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them at once could take seconds, for which every stream would stand still."""
    monkeypatch.setattr(resumed_tokens, "_READ_S", 1e-4)
    story = run(resumed_with_budget(1, 20_000), add(2), resumed_with_budget(3, 100), runner=closing_runner)
    ended = [output.seq_no for output in story.outputs if output.finish_reason is not None]
    assert ended[-1] == 1
    assert (len(story.tokens(1)), len(story.tokens(2)), len(story.tokens(3))) == (2, 6, 2)


def test_a_sequence_whose_tokens_are_being_read_can_be_aborted(
    closing_runner: ArithmeticRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumed_tokens, "_READ_S", 1e-4)

    def abort(report: ipc.StepReport, inbox: Inbox) -> None:
        if not report.outputs:
            inbox.put(ipc.Abort(1))

    story = run(resumed_with_budget(1, 20_000), runner=closing_runner, then=abort)
    assert story.ends() == {1: EngineFinishReason.ABORTED}
    assert not any(report.started for report in story.reports)


def test_a_sequence_whose_tokens_can_not_be_read_ends_alone(
    closing_runner: ArithmeticRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("gone")

    monkeypatch.setattr(ReasoningBudget, "accept", fail)
    story = run(resumed_with_budget(1, 9), add(2), runner=closing_runner)
    assert story.ends() == {1: EngineFinishReason.FAILED, 2: EngineFinishReason.LENGTH}


def test_an_inbox_that_says_none_ends_the_loop_at_once() -> None:
    assert run(None, add(1)).reports == []
    cut = run(add(1), then=lambda report, inbox: inbox.put(None))
    assert [report.started for report in cut.reports] == [[1], []]


def test_an_idle_loop_waits_for_a_command_and_neither_steps_nor_reports() -> None:
    runner = ArithmeticRunner()
    story = run(runner=runner)
    assert (story.inbox.num_waits, runner.num_steps, story.reports) == (1, 0, [])
    story = run(add(1, max_tokens=4), runner=runner)
    assert (story.inbox.num_waits, runner.num_steps) == (1, 4)
    assert len(story.reports) == 5


def test_a_loop_copies_what_is_complete_before_it_waits() -> None:
    size = make_config().kv_block_size
    story = run(
        shared_add(1, 9 * size, max_tokens=1), runner=ArithmeticRunner(exchanging(make_config(writes_through=True)))
    )
    assert len(story.outputs) == 1
    assert story.reports[-1].load.host_blocks == 9
    assert story.inbox.num_waits == 1


def test_all_waiting_commands_are_taken_before_a_step() -> None:
    runner = ArithmeticRunner()
    story = run(*(add(number, num_prompt=1, max_tokens=1) for number in range(1, 9)), runner=runner)
    assert runner.num_steps == 1
    assert story.reports[0].started == list(range(1, 9))


def test_an_abort_of_an_unknown_or_finished_sequence_reports_nothing() -> None:
    assert run(ipc.Abort(99)).reports == []

    def abort_the_ended(report: ipc.StepReport, inbox: Inbox) -> None:
        if any(output.finish_reason for output in report.outputs):
            inbox.put(ipc.Abort(1))

    story = run(add(1, max_tokens=2), ipc.Abort(2), then=abort_the_ended)
    assert story.ends() == {1: EngineFinishReason.LENGTH}
    assert len(story.reports) == 3


def test_an_abort_before_the_first_step_is_reported_once_and_computes_nothing() -> None:
    runner = ArithmeticRunner()
    story = run(add(1), ipc.Abort(1), ipc.Abort(1), runner=runner)
    assert story.outputs == [ipc.SequenceOutput(1, [], EngineFinishReason.ABORTED)]
    assert runner.num_steps == 0
    assert story.reports[-1].load.waiting == 0


def test_an_abort_of_a_running_sequence_frees_its_lane_and_blocks_within_the_step() -> None:
    runner = ArithmeticRunner(make_config(max_num_seqs=1))

    sampled: list[int] = []

    def abort_after_two(report: ipc.StepReport, inbox: Inbox) -> None:
        sampled.extend(output.seq_no for output in report.outputs if output.token_ids)
        if sampled == [1, 1]:
            inbox.put(ipc.Abort(1))

    story = run(add(1, max_tokens=50), add(2, max_tokens=2), runner=runner, then=abort_after_two)
    assert story.ends() == {1: EngineFinishReason.ABORTED, 2: EngineFinishReason.LENGTH}
    assert len(story.tokens(1)) == 2
    assert len(story.tokens(2)) == 2


def test_without_memory_the_youngest_is_preempted_and_goes_on_later() -> None:
    commands = [add(number, max_tokens=6) for number in (1, 2, 3)]
    calm = run(*commands)
    story = run(*commands, runner=ArithmeticRunner(failures={3: InsufficientMemoryError()}))
    assert story.ends() == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH, 3: EngineFinishReason.LENGTH}
    assert [story.tokens(number) for number in (1, 2, 3)] == [calm.tokens(number) for number in (1, 2, 3)]
    assert [report.started for report in story.reports if report.started] == [[1, 2, 3]]


def test_without_memory_cached_blocks_go_before_anyone_is_preempted() -> None:
    runner = ArithmeticRunner(failures={7: InsufficientMemoryError()})

    def go_on(report: ipc.StepReport, inbox: Inbox) -> None:
        if any(output.finish_reason and output.seq_no == 1 for output in report.outputs):
            inbox.put(add(2))
            inbox.put(add(3))

    story = run(shared_add(1, num_prompt=30), runner=runner, then=go_on)
    assert story.ends() == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH, 3: EngineFinishReason.LENGTH}
    loads = [(report.load.running, report.load.waiting, report.load.cached_blocks) for report in story.reports]
    assert loads[6:10] == [(0, 0, 3), (2, 0, 3), (2, 0, 0), (2, 0, 0)]
    assert runner.num_steps == 6 + 1 + 6


def test_running_out_of_memory_again_and_again_costs_steps_but_no_tokens() -> None:
    calm = run(*map(add, (1, 2, 3)))
    runner = ArithmeticRunner(failures={2: InsufficientMemoryError(), 3: InsufficientMemoryError()})
    story = run(*map(add, (1, 2, 3)), runner=runner)
    assert story.ends() == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH, 3: EngineFinishReason.LENGTH}
    assert [story.tokens(number) for number in (1, 2, 3)] == [calm.tokens(number) for number in (1, 2, 3)]
    assert [len(report.outputs) for report in story.reports[1:5]] == [3, 0, 0, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        add(2, max_tokens=-5),
        add(2, max_tokens=10_000),
        add(2, num_prompt=0),
        msgspec.structs.replace(add(2), num_sampled=9),
        msgspec.structs.replace(add(2), token_ids=b"odd"),
    ],
)
def test_a_sequence_that_cannot_be_started_ends_and_harms_no_other(wrong: ipc.Add) -> None:
    story = run(add(1), wrong, add(3))
    assert story.ends() == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.FAILED, 3: EngineFinishReason.LENGTH}
    assert [story.tokens(number) for number in (1, 3)] == [run(add(number)).tokens(number) for number in (1, 3)]


def calls_at_rest(num_cached: int) -> int:
    """The functions that an engine calls for a token of an unrelated sequence and when it is idle then."""
    runner = ArithmeticRunner(make_config(total_kv_blocks=600, context_length=9_000, max_num_batched_tokens=9_000))
    counted = 0

    def count(frame: FrameType, *_: object) -> None:
        nonlocal counted
        counted += "/worker/engine/" in frame.f_code.co_filename

    def report(said: object) -> None:
        assert isinstance(said, ipc.StepReport)
        if any(output.seq_no == 1 for output in said.outputs):
            inbox.put(add(2, num_prompt=1, max_tokens=1))
            sys.setprofile(count)

    inbox = Inbox(shared_add(1, num_prompt=16 * num_cached, max_tokens=1))
    loop = StepLoop(runner, inbox, report, step_target_s=0.05)
    try:
        loop.run()
    finally:
        sys.setprofile(None)
    return counted


def test_the_work_of_an_idle_check_does_not_depend_on_how_much_is_cached() -> None:
    assert calls_at_rest(500) == calls_at_rest(5)


def test_a_preempted_sequence_comes_back_when_another_has_ended() -> None:
    story = run(*map(add, (1, 2, 3)), runner=ArithmeticRunner(failures={2: InsufficientMemoryError()}))
    running = [report.load.running for report in story.reports]
    assert running[2] == 2
    assert 3 not in running[2:]
    assert story.ends() == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH, 3: EngineFinishReason.LENGTH}


def test_a_lone_sequence_without_memory_ends_and_the_loop_goes_on() -> None:
    story = run(add(1), runner=ArithmeticRunner(failures={1: InsufficientMemoryError()}))
    assert story.outputs == [ipc.SequenceOutput(1, [], EngineFinishReason.INSUFFICIENT_MEMORY)]
    assert story.reports[-1].load.running == 0


class BadLogits(ArithmeticRunner):
    """Computes no usable logits for the sequence `victim` once it holds `length` tokens."""

    def __init__(self, victim: int, length: int) -> None:
        super().__init__()
        self.victim = victim
        self.length = length

    def step(self, plan: StepPlan) -> list[Outcome]:
        results = super().step(plan)
        sequences = [part.sequence for part in plan.scheduled]
        return [
            EngineFinishReason.BAD_LOGITS if (s.seq_no, s.num_tokens) == (self.victim, self.length) else result
            for s, result in zip(sequences, results, strict=True)
        ]


def test_logits_that_are_not_numbers_end_only_their_own_sequence() -> None:
    commands = [add(number, num_prompt=3, max_tokens=6) for number in (1, 2, 3)]
    calm = run(*commands)
    story = run(*commands, runner=BadLogits(victim=2, length=5))
    assert story.ends() == {
        1: EngineFinishReason.LENGTH,
        2: EngineFinishReason.BAD_LOGITS,
        3: EngineFinishReason.LENGTH,
    }
    assert (story.tokens(1), story.tokens(3)) == (calm.tokens(1), calm.tokens(3))
    assert story.tokens(2) == calm.tokens(2)[:2]


def test_the_rest_of_a_cached_prompt_is_computed_and_the_first_token_counts_the_cached_ones() -> None:
    runner = ArithmeticRunner()

    def go_on(report: ipc.StepReport, inbox: Inbox) -> None:
        if any(output.finish_reason and output.seq_no == 1 for output in report.outputs):
            inbox.put(shared_add(2, num_prompt=40, max_tokens=2))

    story = run(shared_add(1, num_prompt=30, max_tokens=2), runner=runner, then=go_on)
    assert [output.cached_tokens for output in story.outputs] == [0, None, 30, None]
    assert runner.num_evaluated == 30 + 1 + 10 + 1


def test_blocks_are_reported_with_the_step_that_stored_them_and_the_command_that_removed_them() -> None:
    def clear_at_the_end(report: ipc.StepReport, inbox: Inbox) -> None:
        if any(output.finish_reason for output in report.outputs):
            inbox.put(ipc.ClearCache())

    story = run(shared_add(1, num_prompt=32, max_tokens=2), then=clear_at_the_end)
    root = block_hash.root_hash(block_hash.PrefixDomain("0" * 16, (), "acme", ""))
    prompt = block_hash.unpack_token_ids(shared_add(1, num_prompt=32).token_ids)
    one, two = block_hashes(prompt, 16, root)
    assert [report.stored for report in story.reports] == [[], [(root, one), (one, two)], [], []]
    assert [sorted(report.removed) for report in story.reports] == [[], [], [], sorted([one, two])]
    assert [report.load.cached_blocks for report in story.reports] == [0, 0, 3, 0]


def test_the_progress_of_a_prompt_is_reported_until_it_is_done_with_its_first_token() -> None:
    watched = msgspec.structs.replace(add(1, num_prompt=70), return_progress=True)
    runner = ArithmeticRunner(make_config(max_num_batched_tokens=28))
    story = run(watched, add(2, num_prompt=70), runner=runner)
    seen = [[(one.seq_no, one.computed_tokens, one.cached_tokens) for one in r.progress] for r in story.reports]
    first = next(n for n, report in enumerate(story.reports) if any(o.seq_no == 1 for o in report.outputs))
    assert seen[1 : first + 1] == [[(1, computed, 0)] for computed in (*range(10, 60, 10), 70)]
    assert not any(seen[first + 1 :])


def test_a_prompt_that_takes_one_step_is_reported_too() -> None:
    story = run(msgspec.structs.replace(add(1, num_prompt=5, max_tokens=1), return_progress=True))
    reported = [(one.computed_tokens, one.cached_tokens) for report in story.reports for one in report.progress]
    assert reported == [(5, 0)]


def test_isolated_steps_are_announced_before_and_end_with_a_token() -> None:
    runner = ArithmeticRunner()
    isolated = msgspec.structs.replace(add(2, num_prompt=40), isolated=True)
    commands = [add(1), isolated, add(3)]
    story = run(*commands, runner=runner)
    assert story.isolated == [(0, 2)]
    assert [[output.seq_no for output in report.outputs] for report in story.reports[1:4]] == [[], [2], [2, 1, 3]]
    assert [story.tokens(number) for number in (1, 2, 3)] == [
        run(add(1)).tokens(1),
        run(isolated).tokens(2),
        run(add(3)).tokens(3),
    ]


def test_a_sequence_of_an_earlier_engine_goes_on_where_it_was() -> None:
    whole = run(add(1, num_prompt=5)).tokens(1)
    started = add(1, num_prompt=5)
    token_ids = block_hash.unpack_token_ids(started.token_ids).tolist() + whole[:2]
    story = run(msgspec.structs.replace(started, token_ids=block_hash.pack_token_ids(token_ids), num_sampled=2))
    assert story.tokens(1) == whole[2:]
    assert story.ends() == {1: EngineFinishReason.LENGTH}


def test_a_device_error_leaves_the_loop() -> None:
    with pytest.raises(DeviceError, match="gone"):
        run(add(1), runner=ArithmeticRunner(failures={2: DeviceError("gone")}))


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    runner = ArithmeticRunner(make_config(max_num_batched_tokens=16))
    story = run(add(1, max_tokens=40), add(2, num_prompt=100, max_tokens=2), runner=runner)
    assert story.ends() == {1: EngineFinishReason.LENGTH, 2: EngineFinishReason.LENGTH}
    assert max(runner.step_sizes) <= 16
    first_of_2 = next(place for place, output in enumerate(story.outputs) if output.seq_no == 2)
    assert sum(output.seq_no == 1 for output in story.outputs[:first_of_2]) >= 10


def test_a_stop_token_ends_a_sequence_and_is_reported() -> None:
    free = run(add(1, max_tokens=10)).tokens(1)
    stop = free[4]
    story = run(add(1, max_tokens=10, stop_token_ids=(stop,)))
    assert story.tokens(1) == free[: free.index(stop) + 1]
    assert story.ends() == {1: EngineFinishReason.STOP_TOKEN}


@given(
    asked=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=12),
    max_num_seqs=st.integers(1, 6),
)
@settings(max_examples=60)
def test_sequences_compute_the_same_together_as_alone(asked: list[tuple[int, int, int]], max_num_seqs: int) -> None:
    commands = [
        add(number, num_prompt, max_tokens, ignore_eos=False, seed=seed, temperature=1.0)
        for number, (num_prompt, max_tokens, seed) in enumerate(asked, start=1)
    ]
    config = make_config(max_num_seqs=max_num_seqs, total_kv_blocks=12, max_num_batched_tokens=24)
    together = run(*commands, runner=ArithmeticRunner(config))
    assert sorted(together.ends()) == [command.seq_no for command in commands]
    for command in commands:
        alone = run(command)
        assert together.tokens(command.seq_no) == alone.tokens(command.seq_no)
        assert together.ends()[command.seq_no] == alone.ends()[command.seq_no]
        assert END_TOKEN not in alone.tokens(command.seq_no)[:-1]
    assert together.reports[-1].load.used_blocks == 0


def expect(seq_no: int, num_tokens: int, num_known: int) -> ipc.ExpectTurn:
    """A turn that begins like the prompts of `shared_add`."""
    token_ids = block_hash.unpack_token_ids(shared_add(1, num_known).token_ids).tolist()
    token_ids += [1 + (5 * place) % 90 for place in range(num_tokens - num_known)]
    return ipc.ExpectTurn(seq_no, engine_request.ExpectedTurn(block_hash.pack_token_ids(token_ids), num_known, "acme"))


def test_an_idle_loop_computes_an_expected_turn_and_reports_only_its_blocks() -> None:
    story = run(shared_add(1, 24, 3), expect(2, 60, 24))
    assert set(story.ends()) == {1}
    assert sum(len(one.stored) for one in story.reports) == 59 // 16


def test_a_request_that_comes_meanwhile_is_served_first_and_the_turn_is_completed_after_it() -> None:
    came: list[int] = []

    def then(report: ipc.StepReport, inbox: Inbox) -> None:
        reports.append(report)
        if not came and len([one for one in reports if one.stored]) == 2:  # the first prompt, and the turn's first step
            came.append(len(reports))
            inbox.put(add(3, 5, 4))

    reports: list[ipc.StepReport] = []
    story = run(shared_add(1, 24, 1), expect(2, 200, 24), then=then)
    assert story.ends() == dict.fromkeys((1, 3), EngineFinishReason.LENGTH)
    blocks = [len(one.stored) for one in story.reports]
    served = [place for place, one in enumerate(story.reports) if any(output.seq_no == 3 for output in one.outputs)]
    assert story.reports[came[0]].started == [3], "the next report is of the request"
    assert not any(blocks[came[0] : served[-1] + 1])
    assert sum(blocks[served[-1] + 1 :]) > 0
    assert sum(blocks) == 199 // 16


def test_a_cleared_cache_takes_expected_turns_with_it() -> None:
    story = run(expect(1, 60, 24), ipc.ClearCache())
    assert not any(report.stored for report in story.reports)
