"""Sequences start by what answers are expected to use, and whoever uses more takes it from the last in the order."""

import math
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.executed_scheduler import EOS, ExecutedScheduler, generated
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

MAX_TOKENS = 24


def running(executed: ExecutedScheduler) -> list[int]:
    return [one.seq_no for one in executed.scheduler.running]


def test_sequences_start_by_what_answers_are_expected_to_use_and_not_by_max_tokens() -> None:
    for expected_tokens, started in ((4, 4), (8, 3), (12, 2), (28, 1), (1_000, 1)):
        executed = ExecutedScheduler(total_blocks=9, expected_tokens=expected_tokens)
        for number in range(1, 5):
            executed.add(number, "abcd"[number - 1] * 4, max_tokens=28)
        executed.step()
        assert len(running(executed)) == started, expected_tokens


def test_nobody_is_expected_to_use_more_than_its_max_tokens() -> None:
    executed = ExecutedScheduler(total_blocks=8, expected_tokens=1_000)
    for number in range(1, 5):
        executed.add(number, "abcd"[number - 1] * 4, max_tokens=4)
    executed.step()
    assert running(executed) == [1, 2, 3, 4]


def test_with_an_expectation_above_every_max_tokens_nobody_is_preempted() -> None:
    executed = ExecutedScheduler(total_blocks=8, expected_tokens=1_000)
    for number in range(1, 9):
        executed.add(number, chr(96 + number) * 4, max_tokens=12)
    executed.run()
    assert executed.scheduler.counts.preemptions == 0


def test_what_answers_have_used_is_expected_of_the_next_ones() -> None:
    executed = ExecutedScheduler(total_blocks=200, max_num_seqs=8)
    for number in range(1, 9):
        executed.add(number, chr(96 + number) * 4, max_tokens=700)
    executed.step()
    assert len(running(executed)) == 3  # 65 blocks each, for 256 tokens
    for number in range(1, 9):
        executed.abort(number)
    executed = ExecutedScheduler(total_blocks=200, max_num_seqs=8)
    executed.add(1, "a", max_tokens=700)
    for _ in range(100):
        executed.step()
    executed.abort(1)  # which is how an answer ends that has reached a stop string
    for number in range(2, 10):
        executed.add(number, chr(96 + number) * 4, max_tokens=700)
    executed.step()
    assert len(running(executed)) == 7  # 26 blocks each, for 100 tokens
    assert executed.scheduler.load().expected_answer_tokens == 100


def outlived(total_blocks: int, count: int, steps: int) -> ExecutedScheduler:
    """Sequences that may have 800 tokens each, after so many steps beside each other."""
    executed = ExecutedScheduler(total_blocks=total_blocks, max_num_seqs=8)
    for number in range(1, count + 1):
        executed.add(number, chr(96 + number) * 4, max_tokens=800)
    for _ in range(steps):
        executed.step()
    return executed


def test_where_more_than_twice_the_memory_is_expected_to_be_used_the_last_give_way_before_it_is_full() -> None:
    """There is room to start with 65 blocks each, for 256 tokens. Behind them 201 are expected of each, for all 800."""
    assert running(outlived(402, 5, 256)) == [1, 2, 3, 4, 5]
    executed = outlived(402, 5, 257)
    assert (running(executed), executed.scheduler.counts.preemptions) == ([1, 2], 3)
    assert running(outlived(401, 5, 257)) == [1]


def test_up_to_twice_the_memory_nobody_gives_way_before_it_is_full() -> None:
    assert running(outlived(402, 4, 300)) == [1, 2, 3, 4]
    assert running(outlived(401, 4, 300)) == [1]


def test_one_that_is_longer_than_all_others_drives_nobody_out() -> None:
    executed = outlived(300, 1, 300)
    for number in range(2, 5):
        executed.add(number, chr(96 + number) * 4, max_tokens=800)
    for _ in range(50):
        executed.step()
    assert (running(executed), executed.scheduler.counts.preemptions) == ([1, 2, 3], 0)


def test_the_load_says_how_many_blocks_those_that_have_started_are_expected_to_use() -> None:
    executed = ExecutedScheduler(expected_tokens=4)
    executed.add(1, "aaaa", max_tokens=100)
    executed.add(2, "aaaabbbb", max_tokens=2)
    assert executed.scheduler.load().expected_blocks == 0
    executed.step()
    executed.step()
    assert (executed.scheduler.load().used_blocks, executed.scheduler.load().expected_blocks) == (3, 4)
    executed.add(3, "c" * 9, max_tokens=100)
    assert executed.scheduler.load().expected_blocks == 4


def test_with_each_preemption_twice_as_much_is_reserved_for_it_and_for_those_that_run() -> None:
    """One sequence has eight blocks for certain, the room for the others is enough or a block too little."""
    for preemptions, needed_blocks in ((0, 2 + 2), (1, 3 + 3), (2, 5 + 5), (3, 8 + 8), (9, 8 + 8)):
        for total_blocks in (needed_blocks - 1, needed_blocks):
            executed = ExecutedScheduler(total_blocks=8 + total_blocks, expected_tokens=4)
            executed.add(0, "c" * 31, max_tokens=1)
            executed.add(1, "aaaa", max_tokens=28)
            executed.step(budget=2)
            executed.add(2, "bbbb", max_tokens=28).preemptions = preemptions
            executed.schedule(0)
            assert running(executed) == ([0, 1, 2] if total_blocks == needed_blocks else [0, 1])


def key(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrived_at + sequence.priority, sequence.seq_no


class Watched(ExecutedScheduler):
    """Asserts that turns hold, and counts for each sequence how often one came to run before it."""

    def __init__(self, total_blocks: int, expected_tokens: int, host_blocks: int) -> None:
        super().__init__(
            total_blocks,
            host_blocks=host_blocks,
            expected_tokens=expected_tokens,
            max_cached_blocks=2 if host_blocks else None,
        )
        self.overtaken: dict[int, int] = {}

    def ask(
        self, number: int, arrived_at: float, priority: int, num_prompt: int, max_tokens: int, salt: str | None
    ) -> None:
        token_ids = array("I", [1 + (number * 7 + place // 3) % 80 for place in range(num_prompt)])
        domain = None if salt is None else Domain("acme", salt)
        sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
        one = Sequence(
            number, token_ids, sampling, frozenset({EOS}), domain=domain, priority=priority, arrived_at=arrived_at
        )
        self.sequences[number] = one
        self.overtaken[number] = 0
        self.scheduler.add(one)

    def step_and_watch(self, budget: int, transfer_blocks: int) -> None:
        before = {one.seq_no: one for one in self.scheduler.running}
        counts = {number: one.preemptions for number, one in self.sequences.items()}
        waiting = [one for one in self.sequences.values() if one.lane is None]
        plan = self.step(budget, transfer_blocks)
        preempted = [one for one in before.values() if one.preemptions > counts[one.seq_no]]
        stayed = [one for one in before.values() if one.lane is not None and one.seq_no not in self.ends]
        planned = {part.sequence.seq_no for part in plan.scheduled}
        for one in preempted:  # only those behind it stay that have had their turn in this step already
            assert all(key(other) < key(one) or other.seq_no in planned for other in stayed)
        started = [one for one in waiting if one.lane is not None or one.seq_no in self.ends]
        left = [one for one in waiting if one.lane is None and one.seq_no not in self.ends]
        for one in started:
            assert all(key(one) < key(other) for other in left if other.preemptions == counts[other.seq_no])
            for other in self.sequences.values():
                self.overtaken[other.seq_no] += key(one) < key(other)


ASKED = st.tuples(
    st.integers(0, 4),
    st.integers(-3, 3),
    st.integers(1, 20),
    st.integers(1, MAX_TOKENS),
    st.sampled_from(["", "s", None]),
)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=14),
    expected_tokens=st.sampled_from([0, 1, 2, 5, 11]),
    total_blocks=st.integers(11, 26),
    host_blocks=st.sampled_from([0, 3, 99]),
    budget=st.integers(1, 30),
    transfer_blocks=st.integers(0, 9),
)
def test_everyone_ends_with_the_answer_it_has_alone_and_is_preempted_a_bounded_number_of_times(
    asked: list[tuple[int, int, int, int, str | None]],
    expected_tokens: int,
    total_blocks: int,
    host_blocks: int,
    budget: int,
    transfer_blocks: int,
) -> None:
    watched = Watched(total_blocks, expected_tokens, host_blocks)
    for number, (gap, priority, num_prompt, max_tokens, salt) in enumerate(asked, start=1):
        watched.ask(number, number / 2, priority, num_prompt, max_tokens, salt)
        for _ in range(gap):
            watched.step_and_watch(budget, transfer_blocks)
    for _ in range(2_000):
        if not watched.scheduler.has_work:
            break
        watched.step_and_watch(budget, transfer_blocks=9)
    assert watched.ends == dict.fromkeys(watched.sequences, EngineFinishReason.LENGTH)
    for one in watched.sequences.values():
        # After so many doublings everything is reserved, and only those that come later and before it can preempt it.
        assert one.preemptions <= 1 + math.ceil(math.log2(MAX_TOKENS)) + watched.overtaken[one.seq_no]
        text = "".join(chr(token) for token in one.token_ids[: one.num_prompt])
        assert generated(one) == watched.answer(text, one.sampling.max_tokens)
