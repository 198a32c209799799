"""The expected length of an answer is learned from recent ones, and in doubt the longer one is expected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.engine.scheduling.expectation import AnswerLengths


def learned(*lengths: int, cut: tuple[int, ...] = ()) -> AnswerLengths:
    known = AnswerLengths()
    for length in lengths:
        known.record(length, was_cut=False)
    for length in cut:
        known.record(length, was_cut=True)
    return known


def test_before_any_answer_has_ended_256_tokens_are_expected_and_then_twice_what_there_is() -> None:
    new = AnswerLengths()
    assert [new.remaining(n) for n in (0, 100, 192, 255, 256, 1_000)] == [256, 156, 64, 64, 256, 1_000]


def test_the_mean_of_recent_answers_is_expected_rounded_up() -> None:
    assert learned(100, 201).remaining(0) == 151


def test_of_a_longer_answer_only_those_that_became_longer_tell_anything() -> None:
    known = learned(60, 70, 90, 200, 240)
    assert [known.remaining(n) for n in (0, 60, 80, 90)] == [132, 90, 97, 130]


def test_an_answer_that_is_longer_than_all_others_is_expected_to_become_twice_as_long() -> None:
    known = learned(60, 200)
    assert [known.remaining(n) for n in (199, 200, 500)] == [64, 200, 500]


def test_the_more_answers_are_longer_than_all_others_the_longer_they_are_expected_to_become() -> None:
    known = learned(60, 200)
    assert [known.remaining(500, num_longer) for num_longer in (0, 1, 2, 16)] == [500, 500, 1_000, 8_000]
    assert known.remaining(199, 16) == 64  # of this one something is known
    assert [AnswerLengths().remaining(n, 3) for n in (255, 256)] == [64, 768]


def test_nothing_is_known_beyond_the_longest_recent_answer() -> None:
    assert [AnswerLengths().longest, learned(60).longest, learned(200, 60).longest] == [256, 60, 200]


def test_at_least_64_more_tokens_are_expected() -> None:
    assert learned(1, 1, 1).remaining(0) == 64


def test_only_the_last_64_answers_count() -> None:
    assert learned(*[1_000] * 64, *[100] * 63).remaining(0) == 115
    assert learned(*[1_000] * 64, *[100] * 64).remaining(0) == 100


def test_an_answer_that_was_cut_off_counts_as_no_shorter_than_expected() -> None:
    assert learned(400, cut=(5, 5, 5)).remaining(0) == 400
    assert learned(400, cut=(800,)).remaining(0) == 600


def test_a_fixed_expectation_learns_nothing() -> None:
    fixed = AnswerLengths(fixed=10)
    fixed.record(500, was_cut=False)
    assert [fixed.remaining(n) for n in (0, 9, 10, 100)] == [10, 1, 10, 100]


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=150), st.integers(0, 6_000))
def test_the_expectation_is_the_mean_of_what_longer_answers_added(lengths: list[int], num_sampled: int) -> None:
    known = learned(*lengths)
    longer = [length - num_sampled for length in lengths[-64:] if length > num_sampled]
    if longer:
        assert known.remaining(num_sampled) == max(64, -(-sum(longer) // len(longer)))
    else:
        assert known.remaining(num_sampled) >= max(64, num_sampled)


@pytest.mark.parametrize("fixed", [0, 1, 7])
def test_something_more_is_always_expected(fixed: int) -> None:
    known = AnswerLengths(fixed)
    assert all(known.remaining(n) >= 1 for n in range(20))
