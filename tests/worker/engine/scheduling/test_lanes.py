"""Two schedulers borrow lanes of one pool: idle memory is used by whoever has work, and given up in time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.executed_scheduler import ExecutedScheduler, generated, sizes
from tokenbus.worker.engine.kv.ledger import KvLedger, KvUsage

LANE_BYTES = 1_000
CONTEXT_BLOCKS = 8
"""The blocks of a lane."""


class LedgerShare:
    """A replica's part of a ledger, which checks it at every call."""

    def __init__(self, ledger: KvLedger, max_lanes: int) -> None:
        self.ledger = ledger
        self.number = ledger.join("model", LANE_BYTES, max_lanes)

    def request(self, used: int, idle: int, wanted: int) -> int:
        allowed = self.ledger.request(self.number, used, idle, wanted)
        self.ledger.check()
        return allowed

    def give_back(self, lanes: int) -> None:
        self.ledger.give_back(self.number, lanes)
        assert self.ledger.held_bytes <= self.ledger.budget_bytes

    def usage(self) -> KvUsage:
        return self.ledger.usage(self.number)


class Pair:
    """Two models that share the memory of `num_lanes` lanes."""

    def __init__(self, num_lanes: int = 16, max_num_seqs: int = 16, host_blocks: int = 64) -> None:
        self.ledger = KvLedger(num_lanes * LANE_BYTES)
        self.models = []
        for _ in range(2):
            executed = ExecutedScheduler(
                num_lanes * CONTEXT_BLOCKS,
                max_num_seqs,
                num_lanes,
                host_blocks=host_blocks,
                lane_share=LedgerShare(self.ledger, num_lanes),
            )
            self.models.append(executed)
        self.busy, self.other = self.models

    def work(self, count: int, max_tokens: int = 20) -> None:
        """Gives the busy model sequences, and steps until all that can run do."""
        for number in range(1, count + 1):
            self.busy.add(number, chr(ord("a") + number) * 6, max_tokens)
        self.busy.step(transfer_blocks=99)

    def settle(self) -> None:
        """Lets both ask again, as they do when the pool wakes them."""
        for model in self.models * 2:
            assert model.scheduler.borrowed_lanes is not None
            model.scheduler.borrowed_lanes.ask_again()
            model.step(transfer_blocks=99)


def running(model: ExecutedScheduler) -> int:
    return len(model.scheduler.running)


def test_beside_an_idle_model_the_busy_one_has_all_lanes_and_half_of_them_when_both_want_all() -> None:
    pair = Pair()
    pair.work(16)
    assert running(pair.busy) == 16
    for number in range(1, 17):
        pair.other.add(number, "xyz" * number)
    pair.other.step()
    pair.busy.step()
    pair.other.step()
    assert (running(pair.busy), running(pair.other)) == (8, 8)


def test_the_first_token_of_a_model_that_wakes_comes_with_its_first_step_after_one_of_the_other() -> None:
    pair = Pair()
    pair.work(16)
    woken = pair.other.add(1, "question")
    assert sizes(pair.other.step()) == [], "the memory is still held"
    assert not pair.other.scheduler.has_work, "it waits to be woken"
    assert len(sizes(pair.busy.step(transfer_blocks=99))) == 15
    assert sizes(pair.other.step()) == [(1, 0, 8)]
    assert len(generated(woken)) == 1
    assert pair.busy.scheduler.counts.preemptions == 1


def test_idle_lanes_go_first_those_of_the_model_itself_too() -> None:
    pair = Pair(num_lanes=4, max_num_seqs=4)
    pair.other.add(1, "finished")
    pair.other.run()
    pair.settle()
    assert pair.other.scheduler.load().kv_pool_bytes == LANE_BYTES, "its prefix stays while nobody wants the lane"
    pair.work(4)
    pair.settle()
    assert running(pair.busy) == 4
    assert pair.busy.scheduler.counts.preemptions == 0
    lanes = pair.other.scheduler.borrowed_lanes
    assert lanes is not None
    assert lanes.take_reclaimed() == (1, 0)
    again = pair.other.add(2, "finished")
    pair.settle()
    assert again.num_cached == 7, "the prefix was copied to host memory and comes back"


def test_a_model_whose_requests_have_ended_gives_its_lanes_to_those_that_were_preempted() -> None:
    pair = Pair(num_lanes=4, max_num_seqs=4)
    pair.work(4)
    for number in (1, 2):
        pair.other.add(number, "xy" * number, max_tokens=2)
    pair.settle()
    assert (running(pair.busy), running(pair.other)) == (2, 2)
    pair.other.run()
    pair.settle()
    assert (running(pair.busy), running(pair.other)) == (4, 0)
    pair.busy.run()
    expected = [pair.busy.answer(chr(ord("a") + number) * 6, 20) for number in range(1, 5)]
    assert [generated(pair.busy.sequences[number]) for number in range(1, 5)] == expected


def test_the_load_says_how_many_requests_can_run_now() -> None:
    pair = Pair()
    assert [model.scheduler.load().max_running for model in pair.models] == [16, 16]
    pair.work(16)
    assert [model.scheduler.load().max_running for model in pair.models] == [16, 8]
    assert [model.scheduler.load().kv_pool_bytes for model in pair.models] == [16 * LANE_BYTES, 0]


def test_a_sequence_that_runs_isolated_keeps_its_lane() -> None:
    pair = Pair(num_lanes=2, max_num_seqs=2)
    pair.work(2)
    pair.busy.sequences[2].isolated = True
    pair.other.add(1, "x")
    pair.other.step()
    pair.busy.step()
    assert [one.seq_no for one in pair.busy.scheduler.running] == [2]


def test_an_aborted_sequence_wants_no_lane_any_more() -> None:
    pair = Pair(num_lanes=2, max_num_seqs=2)
    pair.work(2)
    pair.other.add(1, "x")
    pair.other.step()
    pair.other.abort(1)
    pair.other.step()
    pair.busy.step()
    assert running(pair.busy) == 2


@given(
    events=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(("add", "step", "abort")), st.integers(1, 24)), max_size=60
    ),
    num_lanes=st.integers(2, 6),
    host_blocks=st.sampled_from((0, 16)),
)
@settings(max_examples=80)
def test_whatever_comes_when_every_answer_is_the_same_as_alone(
    events: list[tuple[int, str, int]], num_lanes: int, host_blocks: int
) -> None:
    pair = Pair(num_lanes, max_num_seqs=num_lanes, host_blocks=host_blocks)
    asked: list[dict[int, tuple[str, int]]] = [{}, {}]
    for who, what, size in events:
        model = pair.models[who]
        number = len(model.sequences) + 1
        if what == "add":
            asked[who][number] = ("abc"[size % 3] * size, 1 + size % 5)
            model.add(number, *asked[who][number])
        elif what == "abort" and size in model.sequences and size not in model.ends:
            model.abort(size)
            del asked[who][size]
        else:
            model.step(transfer_blocks=size % 4)
    for _ in range(2_000):
        if not any(len(model.ends) < len(model.sequences) for model in pair.models):
            break
        pair.settle()
    else:
        pytest.fail("a sequence never ended")
    for model, texts in zip(pair.models, asked, strict=True):
        for number, (text, max_tokens) in texts.items():
            assert generated(model.sequences[number]) == model.answer(text, max_tokens)
