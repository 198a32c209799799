"""A sequence knows from its counters alone which tokens are to be computed, and when it ends."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

EOS, OWN_STOP, PLAIN = 2, 3, 7


def sequence(num_prompt: int = 3, **sampling: object) -> Sequence:
    fields: dict[str, object] = {"max_tokens": 8, "stop_token_ids": (OWN_STOP,)} | sampling
    return Sequence(1, array("I", [PLAIN] * num_prompt), engine_request.Sampling(**fields), frozenset({EOS}))  # type: ignore[arg-type]


def sampled(sequence: Sequence, *token_ids: int) -> list[EngineFinishReason | None]:
    """Computes what there is and appends each token in turn."""
    ends = []
    for token_id in token_ids:
        sequence.num_computed = sequence.num_tokens
        ends.append(sequence.append([token_id]))
    return ends


def test_a_new_sequence_has_its_whole_prompt_to_compute() -> None:
    new = sequence(num_prompt=5, max_tokens=4)
    assert (new.num_prompt, new.num_tokens, new.num_computed, new.num_uncomputed) == (5, 5, 0, 5)
    assert (new.num_sampled, new.max_num_tokens, new.lane) == (0, 9, None)


def test_a_sampled_token_is_one_token_to_compute() -> None:
    one = sequence()
    sampled(one, PLAIN)
    assert (one.num_prompt, one.num_tokens, one.num_sampled, one.num_uncomputed) == (3, 4, 1, 1)


def test_it_ends_by_length_with_the_last_of_max_tokens_and_not_before() -> None:
    assert sampled(sequence(max_tokens=3), PLAIN, PLAIN, PLAIN) == [None, None, EngineFinishReason.LENGTH]
    assert sampled(sequence(max_tokens=1), PLAIN) == [EngineFinishReason.LENGTH]


@pytest.mark.parametrize("stop", [EOS, OWN_STOP])
def test_it_ends_at_the_models_end_tokens_and_at_its_own(stop: int) -> None:
    assert sampled(sequence(), PLAIN, stop) == [None, EngineFinishReason.STOP_TOKEN]


def test_a_stop_token_in_the_last_place_is_a_stop_and_no_length() -> None:
    assert sampled(sequence(max_tokens=2), PLAIN, EOS) == [None, EngineFinishReason.STOP_TOKEN]


def test_a_stop_token_counts_as_sampled() -> None:
    one = sequence()
    sampled(one, PLAIN, EOS)
    assert one.num_sampled == 2


def test_ignore_eos_goes_on_past_the_models_end_tokens_but_not_past_its_own() -> None:
    assert sampled(sequence(ignore_eos=True), EOS, EOS, OWN_STOP) == [None, None, EngineFinishReason.STOP_TOKEN]


def test_min_tokens_many_tokens_do_not_stop_and_the_next_one_may() -> None:
    assert sampled(sequence(min_tokens=2), EOS, OWN_STOP, EOS) == [None, None, EngineFinishReason.STOP_TOKEN]


def test_it_may_stop_once_min_tokens_are_there() -> None:
    one = sequence(min_tokens=2)
    said = [one.may_stop]
    for _ in range(2):
        sampled(one, PLAIN)
        said.append(one.may_stop)
    assert said == [False, False, True]
    assert sequence(min_tokens=0).may_stop


def test_max_tokens_end_it_even_below_min_tokens() -> None:
    assert sampled(sequence(max_tokens=2, min_tokens=5), EOS, EOS) == [None, EngineFinishReason.LENGTH]


def test_a_token_is_sampled_only_behind_the_last_one_computed() -> None:
    one = sequence(num_prompt=3)
    one.num_computed = 2
    with pytest.raises(AssertionError):
        one.append([PLAIN])
    assert one.num_tokens == 3


def test_its_prompt_is_its_own_copy() -> None:
    prompt = array("I", [1, 2])
    one = Sequence(1, prompt, engine_request.Sampling(max_tokens=4), frozenset())
    one.num_computed = 2
    one.append([5])
    assert list(prompt) == [1, 2]
    assert list(one.token_ids) == [1, 2, 5]


def test_a_sequence_taken_over_has_sampled_its_last_tokens_and_computes_all() -> None:
    token_ids = array("I", [PLAIN] * 3 + [4, 5])
    one = Sequence(1, token_ids, engine_request.Sampling(max_tokens=3), frozenset({EOS}), num_resumed=2)
    assert (one.num_prompt, one.num_sampled, one.num_uncomputed, one.max_num_tokens) == (3, 2, 5, 6)
    one.reuse_prefix(4)
    assert (one.num_computed, one.num_cached) == (4, 0)
    assert sampled(one, PLAIN) == [EngineFinishReason.LENGTH]


def test_a_sequence_of_sampled_tokens_only_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        Sequence(1, array("I", [1, 2]), engine_request.Sampling(max_tokens=3), frozenset(), num_resumed=2)


def test_an_isolated_sequence_is_isolated_until_its_next_token() -> None:
    one = Sequence(1, array("I", [1]), engine_request.Sampling(max_tokens=3), frozenset(), isolated=True)
    assert one.isolated
    sampled(one, PLAIN)
    assert not one.isolated


def test_a_sequence_without_a_prompt_or_without_room_for_a_token_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        Sequence(1, array("I"), engine_request.Sampling(max_tokens=1), frozenset())
    with pytest.raises(AssertionError):
        Sequence(1, array("I", [1]), engine_request.Sampling(max_tokens=0), frozenset())


@pytest.mark.parametrize("num_computed", [-1, 4])
def test_integrity_is_broken_by_more_computed_than_there_is_and_by_less_than_nothing(num_computed: int) -> None:
    one = sequence(num_prompt=3)
    one.num_computed = num_computed
    with pytest.raises(AssertionError):
        one.check_integrity()


def test_reused_tokens_of_the_prompt_count_as_cached_and_computed_ones_do_not() -> None:
    one = sequence(num_prompt=10)
    one.reuse_prefix(4)
    one.num_computed = 6
    one.reuse_prefix(9)
    assert (one.num_computed, one.num_cached, one.num_uncomputed) == (9, 4 + 3, 1)


def test_all_tokens_but_the_last_may_be_reused_and_never_fewer_than_it_has() -> None:
    one = sequence(num_prompt=5)
    one.reuse_prefix(4)
    for num_computed in (3, 5):
        with pytest.raises(AssertionError):
            one.reuse_prefix(num_computed)
    assert (one.num_computed, one.num_cached) == (4, 4)


def test_a_sequence_preempted_in_its_prompt_starts_over_and_nothing_was_cached() -> None:
    one = sequence(num_prompt=10)
    one.lane = 3
    one.reuse_prefix(4)
    one.num_computed = 6
    one.preempt()
    assert (one.num_computed, one.num_cached, one.preemptions) == (0, 0, 1)
    assert one.lane is None


def test_a_sequence_preempted_later_keeps_its_sampled_and_cached_tokens() -> None:
    one = sequence(num_prompt=10)
    one.reuse_prefix(4)
    sampled(one, PLAIN, PLAIN)
    one.preempt()
    assert (one.num_computed, one.num_sampled, one.num_uncomputed, one.num_cached) == (0, 2, 12, 4)
    one.reuse_prefix(11)
    assert (one.num_computed, one.num_cached) == (11, 4)
    one.check_integrity()


@pytest.mark.parametrize("num_cached", [-1, 3])
def test_integrity_is_broken_by_a_prompt_that_is_cached_to_its_last_token(num_cached: int) -> None:
    one = sequence(num_prompt=3)
    one.num_cached = num_cached
    with pytest.raises(AssertionError):
        one.check_integrity()


@given(
    token_ids=st.lists(st.sampled_from([EOS, OWN_STOP, PLAIN]), min_size=12, max_size=12),
    max_tokens=st.integers(1, 10),
    min_tokens=st.integers(0, 12),
    ignore_eos=st.booleans(),
)
@settings(max_examples=200)
def test_it_ends_exactly_where_a_search_over_all_tokens_says(
    token_ids: list[int], max_tokens: int, min_tokens: int, ignore_eos: bool
) -> None:
    stops = {OWN_STOP} if ignore_eos else {OWN_STOP, EOS}
    stop_at = [place for place, token in enumerate(token_ids) if token in stops and place >= min_tokens]
    expected = (
        (stop_at[0], EngineFinishReason.STOP_TOKEN)
        if stop_at and stop_at[0] < max_tokens
        else (max_tokens - 1, EngineFinishReason.LENGTH)
    )
    one = sequence(max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos)
    for place, token in enumerate(token_ids):
        (end,) = sampled(one, token)
        one.check_integrity()
        if end is not None:
            assert (place, end) == expected
            return
    raise AssertionError("it never ended")
