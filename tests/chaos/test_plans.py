"""Tests that a seed determines the faults of a round, and that flags give it another size."""

import pytest

from tests.chaos.__main__ import parse, said, sizes_of
from tests.chaos.plans import KINDS, Fault, engine_of, faults
from tests.chaos.round import setup_of


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


def test_flags_change_the_size_of_a_round_and_nothing_else() -> None:
    given = "--workers 5 --ready 3 --tokens 4800 --load-s 0.5"
    sizes = sizes_of(parse(["run", "--kind", "roll", *given.split()]))
    assert said(sizes) == given
    changed = setup_of("roll", 0, **sizes)
    assert (changed.num_workers, changed.num_ready, changed.num_tokens, changed.load_s) == (5, 3, 4_800, 0.5)
    assert changed.num_gateways == 0
    assert setup_of("roll", 0, **sizes_of(parse(["run"]))) == setup_of("roll", 0)


def test_rounds_of_another_size_are_simulated_unless_they_name_an_engine() -> None:
    assert [setup_of("roll", 4).engine, setup_of("roll", 4, load_s=1.0).engine] == ["demo", "sim"]
    assert setup_of("roll", 0, engine="demo").num_workers == 2


def test_streams_over_http_have_two_gateways() -> None:
    assert setup_of("roll", 0, **sizes_of(parse(["run", "--http", "8"]))).num_gateways == 2


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        (["--workers", "1"], "--workers must be from 2 to 100, got 1"),
        (["--workers", "4", "--ready", "5"], "--ready must be from 1 to 4, got 5"),
        (["--tokens", "99"], "--tokens must be from 100 to 10,000, got 99"),
        (["--load-s", "-1"], "--load-s must be from 0 to 600, got -1"),
        (["--load-s", "nan"], "--load-s must be from 0 to 600, got nan"),
        (["--engine", "demo", "--load-s", "1"], "--load-s is for simulated workers"),
        (["--http", "101"], "--http must be from 0 to 100, got 101"),
    ],
)
def test_a_size_that_no_round_can_have_is_refused(
    flags: list[str], allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["run", *flags])
    assert allowed in capsys.readouterr().err
