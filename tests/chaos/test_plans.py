"""Tests that a seed determines the faults of a round."""

import pytest

from tests.chaos.plans import KINDS, Fault, engine_of, faults


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_faults_and_another_one_gives_others(kind: str) -> None:
    assert list(faults(kind, 3)) == list(faults(kind, 3)) != list(faults(kind, 4))
    assert len(list(faults(kind, 3))) == KINDS[kind].per_round
    assert [fault.number for fault in faults(kind, 3, 2)] == [0, 1]


def test_faults_are_of_their_kind_and_mixed_ones_of_all_that_leave_a_system_behind() -> None:
    assert {fault.kind for fault in faults("roll", 1)} == {"roll"}
    mixed = {fault.kind for fault in faults("mixed", 1, 300)}
    assert mixed == {"kill_engine", *KINDS} - {"mixed", "roll", "kill_while_loading"}


def test_times_are_within_their_bounds_and_come_near_them() -> None:
    drawn = list(faults("pause_worker", 1, 1_000))
    assert_spread([fault.pause_s for fault in drawn], 0.5, 5.0)
    assert_spread([fault.away_s for fault in drawn], 0.3, 4.0)
    assert {fault.part for fault in drawn} == {"front", "engine", "both"}
    assert {fault.is_beside for fault in drawn} == {False, True}
    assert {fault.target % 3 for fault in drawn} == {0, 1, 2}


def assert_spread(values: list[float], low: float, high: float) -> None:
    margin = (high - low) / 50
    assert low <= min(values) < low + margin
    assert high - margin < max(values) <= high


def test_one_round_in_ten_is_of_the_demo_model() -> None:
    assert [engine_of(seed) for seed in range(20)].count("demo") == 2
    assert all(kind.aim % kind.per_round == 0 for kind in KINDS.values())
    assert min(kind.aim // kind.per_round for kind in KINDS.values()) >= 10


def test_a_fault_says_all_that_was_drawn() -> None:
    assert next(faults("roll", 5)) != Fault("roll", 0, 0.0, 0, 0.0, 0.0, "front", True)
