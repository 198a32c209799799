"""Expected turns are computed in steps that nobody else needs, set aside for any request, and counted when used."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.executed_scheduler import ExecutedScheduler, generated, sizes
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.next_turns import TurnAhead, TurnsAhead
from tokenbus.worker.engine.scheduling.plan import StepPlan, Undone
from tokenbus.worker.engine.scheduling.sequence import Sequence

QUESTION = "What is the weather like in Oslo today?"
ANSWER = "It rains in the morning, then the sun comes out."
NEXT = QUESTION + ANSWER + "\n<user>"


class Lent:
    """A part of a pool that may hold `limit` lanes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.told: list[tuple[int, int]] = []

    def request(self, used: int, idle: int, wanted: int) -> int:
        self.told.append((used, idle))
        return self.limit

    def give_back(self, lanes: int) -> None:
        self.told.append((lanes, 0))

    def usage(self) -> None:
        return None


def conversation(**settings: Any) -> ExecutedScheduler:
    """One whose first turn has ended; its answer is not what the next prompt repeats."""
    executed = ExecutedScheduler(**settings)
    executed.add(1, QUESTION + "<think>", max_tokens=20)
    executed.run()
    return executed


def ahead(executed: ExecutedScheduler, tokens: int = 16) -> list[tuple[int, int, int]]:
    """The shares of all steps that are computed until nothing more is expected."""
    shares = []
    while executed.scheduler.next_turns:
        shares += sizes(executed.step(ahead_tokens=tokens))
    return shares


def test_a_turn_is_computed_from_where_it_differs_up_to_its_last_token() -> None:
    executed = conversation()
    executed.expect(2, NEXT, len(QUESTION))
    shares = ahead(executed)
    assert shares[0][1] == len(QUESTION)
    assert [share[2] for share in shares[:-1]] == [16] * (len(shares) - 1)
    assert shares[-1][1] + shares[-1][2] == len(NEXT) - 1
    assert executed.scheduler.next_turns.computed_tokens == len(NEXT) - 1 - len(QUESTION)


def test_the_next_turn_computes_only_what_is_new_and_its_tokens_stay_the_same() -> None:
    executed = conversation()
    executed.expect(2, NEXT, len(QUESTION))
    ahead(executed)
    one = executed.add(3, NEXT + "And tomorrow?")
    executed.run()
    assert one.num_cached == len(NEXT) - 1
    assert list(one.token_ids[one.num_prompt :]) == executed.answer(NEXT + "And tomorrow?")
    turns = executed.scheduler.next_turns
    assert turns.used_tokens == turns.computed_tokens == len(NEXT) - 1 - len(QUESTION)


def test_nothing_is_computed_ahead_while_any_sequence_runs_or_waits() -> None:
    executed = conversation(max_num_seqs=1)
    executed.expect(2, NEXT, len(QUESTION))
    executed.add(3, "one", max_tokens=3)
    executed.add(4, "two", max_tokens=3)
    while executed.scheduler.has_work:
        assert all(number != 2 for number, _, _ in sizes(executed.step(ahead_tokens=16)))
    assert ahead(executed)


def test_a_request_sets_a_turn_aside_at_once_and_it_continues_where_it_was() -> None:
    executed = conversation(max_num_seqs=1)
    executed.expect(2, NEXT, len(QUESTION))
    executed.step(ahead_tokens=16)
    other = executed.add(3, "a request", max_tokens=2)
    assert sizes(executed.step(ahead_tokens=16)) == [(3, 0, len("a request"))]
    executed.run()
    assert other.num_sampled == 2
    assert ahead(executed)[0][1] == len(QUESTION) + 16
    assert executed.scheduler.next_turns.computed_tokens == len(NEXT) - 1 - len(QUESTION)


def test_a_turn_whose_request_comes_early_is_given_up_and_its_part_is_used() -> None:
    executed = conversation()
    executed.expect(2, NEXT, len(QUESTION))
    executed.step(ahead_tokens=16)
    one = executed.add(3, NEXT + "And tomorrow?")
    executed.run()
    assert one.num_cached == len(QUESTION) + 16
    assert executed.scheduler.next_turns.used_tokens == 16
    assert not executed.scheduler.next_turns


def test_where_the_answer_is_cached_as_it_is_rendered_nothing_is_computed() -> None:
    executed = conversation()
    executed.add(2, QUESTION + "<think>" + ANSWER)
    executed.run()
    executed.expect(3, QUESTION + "<think>" + ANSWER, len(QUESTION))
    assert ahead(executed) == []
    assert executed.scheduler.next_turns.computed_tokens == 0


def test_another_answer_to_the_last_prompt_is_not_taken_for_the_next_turn() -> None:
    executed = conversation()
    executed.expect(2, NEXT, len(QUESTION))
    executed.add(3, QUESTION + "<think>")
    executed.run()
    assert executed.scheduler.next_turns
    executed.add(4, NEXT)
    assert not executed.scheduler.next_turns


def test_the_load_says_nothing_of_a_turn_that_is_computed_ahead() -> None:
    executed = conversation()
    before = executed.scheduler.load()
    executed.expect(2, NEXT, len(QUESTION))
    executed.step(ahead_tokens=16)
    load = executed.scheduler.load()
    assert (load.running, load.waiting, load.queued_prefill_tokens) == (0, 0, 0)
    assert (load.used_blocks, load.expected_blocks, load.computed_tokens) == (0, 0, before.computed_tokens)
    assert load.cached_blocks + load.free_blocks == before.cached_blocks + before.free_blocks
    assert not executed.scheduler.has_work


def test_a_turn_for_which_there_is_no_room_is_given_up() -> None:
    executed = conversation(total_blocks=20)
    executed.expect(2, NEXT, len(QUESTION))
    assert ahead(executed) == []
    assert not executed.scheduler.next_turns


def turns_of(*tenants: str, num_tokens: int = 8) -> tuple[TurnsAhead, list[TurnAhead]]:
    """Turns of these tenants, in this order."""
    executed = ExecutedScheduler()
    made = [executed.expect(place, "x" * num_tokens, 4, tenant) for place, tenant in enumerate(tenants, start=1)]
    return executed.scheduler.next_turns, made


def test_tenants_take_turns_by_what_was_computed_for_them() -> None:
    executed = ExecutedScheduler()
    for number, tenant in enumerate(("acme", "acme", "acme", "other", "other"), start=1):
        executed.expect(number, str(number) * 20 + "." * number, 0, tenant)
    assert [number for number, _, _ in ahead(executed, 99)] == [1, 4, 2, 5, 3]


def test_the_tenant_with_the_most_tokens_loses_its_oldest_turn() -> None:
    turns, (few, *_) = turns_of("few", *["many"] * 58)
    assert len(turns) == 32
    assert turns.next() is few
    turns.forget()
    assert not turns
    turns, made = turns_of("one", num_tokens=1 << 19)
    turns.add(dataclasses.replace(made[0]))
    assert len(turns) == 2
    turns.add(dataclasses.replace(made[0], domain=Domain("other"), token_ids=made[0].token_ids[:9]))
    assert len(turns) == 2, "one of those that have a million tokens together is gone"


def test_a_turn_that_can_not_be_computed_is_given_up_and_leaves_nothing() -> None:
    executed = conversation()
    cached = executed.pool.cache.evictable_blocks
    executed.expect(2, NEXT, len(QUESTION))
    (share,) = executed.schedule(ahead_tokens=16).scheduled
    executed.scheduler.update(StepPlan((share,)), [Undone.POISONED])
    executed.scheduler.check_integrity()
    assert not executed.scheduler.next_turns
    assert executed.pool.cache.evictable_blocks == cached


def test_lanes_that_another_replica_wants_are_given_back_by_a_turn_that_is_computed() -> None:
    share = Lent(4)
    executed = conversation(lane_share=share)
    executed.expect(2, NEXT, len(QUESTION))
    executed.step(ahead_tokens=16)
    assert executed.scheduler.next_turns.is_computing
    assert not executed.scheduler.has_work
    share.limit = 0
    executed.scheduler.borrowed_lanes.ask_again()  # type: ignore[union-attr]
    executed.step(ahead_tokens=16)
    assert not executed.scheduler.next_turns.is_computing
    assert executed.pool.cache.lanes.num_taken == 0
    assert share.told[-1] == (0, 0)


@pytest.mark.parametrize("num_sampled", [0, 2])
def test_a_resumed_stream_is_not_a_next_turn(num_sampled: int) -> None:
    turns, (expected,) = turns_of("acme")
    sampling = engine_request.Sampling(max_tokens=9)
    one = Sequence(2, expected.token_ids * 2, sampling, (), num_resumed=num_sampled, domain=Domain("acme"))
    turns.came(one)
    assert len(turns) == (1 if num_sampled else 0)


def test_an_unloaded_adapter_takes_the_turns_that_use_it_with_it() -> None:
    turns, (plain, adapted) = turns_of("acme", "acme")
    adapted.domain = Domain("acme", adapters=(Adapter("d", 1.0),))
    turns.forget("d")
    assert turns.next() is plain
    assert len(turns) == 1


TEXTS = [QUESTION[: 3 * place] + tail * 3 for place in range(5) for tail in ("a", "bc", "def", "longer tail")]
ACTS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(TEXTS)),
    st.tuples(st.just("expect"), st.sampled_from(TEXTS)),
    st.tuples(st.just("step"), st.sampled_from([0, 1, 7, 64])),
    st.tuples(st.just("forget"), st.none()),
)


@given(
    acts=st.lists(ACTS, max_size=40),
    total_blocks=st.integers(24, 60),
    num_lanes=st.integers(2, 5),
    host_blocks=st.sampled_from([0, 8, 40]),
)
def test_whatever_is_computed_ahead_answers_stay_the_same_and_all_memory_comes_back(
    acts: list[tuple[str, Any]], total_blocks: int, num_lanes: int, host_blocks: int
) -> None:
    executed = ExecutedScheduler(total_blocks, 2, num_lanes, host_blocks=host_blocks)
    sequences: dict[int, str] = {}
    for number, (act, value) in enumerate(acts, start=1):
        if act == "add":
            executed.add(number, value, 3)
            sequences[number] = value
        elif act == "expect":
            executed.expect(number, value, len(value) // 2)
        elif act == "step":
            executed.step(transfer_blocks=2, ahead_tokens=value)
        else:
            executed.scheduler.next_turns.forget()
    executed.run(transfer_blocks=2)
    for _ in range(200):
        executed.step(transfer_blocks=2, ahead_tokens=16)
    turns = executed.scheduler.next_turns
    assert not turns
    assert turns.used_tokens <= turns.computed_tokens
    assert executed.pool.cache.used_blocks == 0
    for number, text in sequences.items():
        assert generated(executed.sequences[number]) == executed.answer(text, 3)
