"""Sequences of several sets of adapters in one scheduler: each step has all of them, one group for each set."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.executed_scheduler import ExecutedScheduler
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.engine.scheduling.plan import StepPlan

SETS: list[tuple[Adapter, ...]] = [
    (),
    (Adapter("a", 1.0),),
    (Adapter("a", 0.5),),
    (Adapter("b", 1.0),),
    (Adapter("a", 1.0), Adapter("b", 1.0)),
]
REQUESTS = st.lists(
    st.tuples(st.sampled_from(SETS), st.text("abc", min_size=1, max_size=20), st.integers(1, 8)), max_size=10
)


def check_groups(plan: StepPlan) -> None:
    groups = plan.batches()
    assert sorted(id(one) for group in groups for one in group) == sorted(map(id, plan.scheduled))
    assert all(len({one.sequence.adapters for one in group}) == 1 for group in groups)
    assert len(groups) == len({one.sequence.adapters for one in plan.scheduled})
    for group in groups:  # in the order of the plan
        places = [plan.scheduled.index(one) for one in group]
        assert places == sorted(places)


@given(REQUESTS, st.integers(1, 12))
def test_no_set_of_adapters_waits_for_another(
    requests: list[tuple[tuple[Adapter, ...], str, int]], budget: int
) -> None:
    executed = ExecutedScheduler(total_blocks=64, max_num_seqs=4)
    for number, (adapters, text, max_tokens) in enumerate(requests):
        executed.add(number, text, max_tokens, adapters)
    for _ in range(1_000):
        if not executed.scheduler.has_work:
            break
        decoding = {one.seq_no for one in executed.scheduler.running if one.is_decoding}
        plan = executed.step(budget)
        check_groups(plan)
        assert decoding <= {one.sequence.seq_no for one in plan.scheduled}
    assert executed.ends.keys() == executed.sequences.keys()


def test_a_plan_without_adapters_is_one_group() -> None:
    executed = ExecutedScheduler()
    for number in range(3):
        executed.add(number, "abc")
    assert len(executed.step().batches()) == 1


def test_only_sequences_with_equal_adapters_share_blocks() -> None:
    executed = ExecutedScheduler(total_blocks=64)
    for number, adapters in enumerate([SETS[0], SETS[1], SETS[2], SETS[1]]):
        executed.add(number, "abcabcabc", 1, adapters)
        while executed.scheduler.has_work:
            executed.step()
    assert [executed.sequences[number].num_cached > 0 for number in range(4)] == [False, False, False, True]
