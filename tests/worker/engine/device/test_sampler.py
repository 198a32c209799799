"""The sampler repeats what a seed says, changes logits as asked, and no row disturbs its neighbours."""

import math
from array import array
from collections.abc import Sequence as Listing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sampling import asked, matrix, reference, some_logits
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.device.draws import Matrix, uniform
from tokenbus.worker.engine.device.sampler import Sampler
from tokenbus.worker.engine.scheduling.plan import SampledToken
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

EOS, VOCAB = 0, 12
SEEDS = st.integers(0, 2**32 - 1)


def sequence(
    seq_no: int, sampling: engine_request.Sampling, prompt: Listing[int] = (1,), said: Listing[int] = ()
) -> Sequence:
    """A sequence that has sampled some tokens already."""
    one = Sequence(seq_no, array("I", prompt), sampling, frozenset({EOS}))
    for token_id in said:
        one.num_computed = one.num_tokens
        one.append([token_id])
    return one


def chosen(
    logits: Matrix, sequences: Listing[Sequence], end_token_ids: frozenset[int] = frozenset({EOS})
) -> list[SampledToken | EngineFinishReason]:
    """By a sampler of its own, of a copy of the logits."""
    one = Sampler(end_token_ids, logits.shape[1])
    for each in sequences:
        one.add_sequence(each.seq_no, each.sampling)
    return one.sample(logits.copy(), sequences)


def token(row: Listing[float], one: Sequence) -> int:
    (result,) = chosen(matrix(row), [one])
    assert isinstance(result, SampledToken)
    return result.token_id


def test_without_a_temperature_the_likeliest_token_is_chosen_in_every_row() -> None:
    logits = some_logits(5, 20, 333)
    sequences = [sequence(n, asked(top_k=n, top_p=0.5, seed=n)) for n in range(20)]
    assert chosen(logits, sequences) == [SampledToken(int(token_id)) for token_id in logits.argmax(axis=1)]


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = some_logits(6, 20, 333)
    sequences = [sequence(n, asked(top_k=1, temperature=5.0, seed=n)) for n in range(20)]
    assert chosen(logits, sequences) == [SampledToken(int(token_id)) for token_id in logits.argmax(axis=1)]


@pytest.mark.parametrize("top_k", [256, 257])
def test_the_last_narrow_top_k_and_the_first_wide_one_draw_as_the_reference_does(top_k: int) -> None:
    logits = some_logits(3, 1, 2_000) / 10
    params = asked(temperature=2.0, top_k=top_k, seed=11)
    for said in range(20):
        one = sequence(1, params, said=[5] * said)
        expected, _ = reference(logits[0].tolist(), params, uniform(11, said))
        assert token(logits[0], one) == expected


def test_a_seed_repeats_itself_whoever_runs_beside() -> None:
    logits = some_logits(9, 1, 200) / 4
    params = asked(temperature=1.0, seed=3, top_k=100)
    alone = [token(logits[0], sequence(1, params, said=[5] * place)) for place in range(30)]
    beside = []
    for place in range(30):
        others = [sequence(n, asked(temperature=1.0, seed=n, top_k=10 * n)) for n in (2, 3)]
        rows = np.concatenate([some_logits(place, 1, 200), logits, some_logits(place + 1, 1, 200)])
        results = chosen(rows, [others[0], sequence(1, params, said=[5] * place), others[1]])
        assert isinstance(results[1], SampledToken)
        beside.append(results[1].token_id)
    assert alone == beside
    assert len(set(alone)) > 5


def test_other_seeds_draw_otherwise() -> None:
    logits = some_logits(9, 1, 200) / 4
    drawn = {token(logits[0], sequence(1, asked(temperature=1.0, seed=seed))) for seed in range(30)}
    assert len(drawn) > 5


# what is changed in the logits before


def changed(row: Listing[float], one: Sequence) -> list[float]:
    """The logits of which the token was chosen: `sample` writes into them."""
    logits = matrix(row)
    sampler = Sampler(frozenset({EOS}), len(row))
    sampler.add_sequence(one.seq_no, one.sampling)
    sampler.sample(logits, [one])
    return [float(logit) for logit in logits[0]]


def test_a_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    params = asked(repetition_penalty=2.0)
    row = [8.0, 3.0, -3.0, 0.0, 5.0]
    assert changed(row, sequence(1, params, prompt=[1, 2], said=[3, 2])) == [8.0, 1.5, -6.0, 0.0, 5.0]


def test_a_presence_penalty_is_taken_once_and_a_frequency_penalty_as_often_as_a_token_occurs() -> None:
    row = [8.0, 3.0, -3.0, 0.0, 5.0]
    repeated = {"prompt": [1, 2], "said": [2, 2]}
    assert changed(row, sequence(1, asked(presence_penalty=0.5), **repeated)) == [8.0, 2.5, -3.5, 0.0, 5.0]
    assert changed(row, sequence(1, asked(frequency_penalty=0.5), **repeated)) == [8.0, 2.5, -4.5, 0.0, 5.0]
    assert changed(row, sequence(1, asked(frequency_penalty=-1.0), **repeated)) == [8.0, 4.0, 0.0, 0.0, 5.0]


def test_the_repetition_penalty_comes_before_the_others() -> None:
    params = asked(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25)
    assert changed([0.0, 8.0, -8.0], sequence(1, params, prompt=[1, 1, 2])) == [0.0, 4 - 1 - 0.5, -16 - 1 - 0.25]


@pytest.mark.parametrize(
    ("last_n", "hit"), [(1, {4}), (2, {3, 4}), (3, {2, 3, 4}), (4, {1, 2, 3, 4}), (99, {1, 2, 3, 4})]
)
def test_only_the_last_tokens_are_looked_at(last_n: int, hit: set[int]) -> None:
    params = asked(presence_penalty=1.0, repetition_last_n=last_n)
    after = changed([2.0] * 6, sequence(1, params, prompt=[1, 2], said=[3, 4]))
    assert {token_id for token_id, logit in enumerate(after) if logit == 1.0} == hit
    assert after.count(2.0) == 6 - len(hit)


def test_penalties_that_look_at_no_token_change_nothing() -> None:
    params = asked(presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=2.0, repetition_last_n=0)
    assert changed([2.0] * 6, sequence(1, params, prompt=[1, 2])) == [2.0] * 6


def test_a_bias_is_added_and_the_penalties_come_after_it() -> None:
    assert changed([0.0, 1.0, 2.0], sequence(1, asked(logit_bias=((1, 5.0), (2, -4.0))))) == [0.0, 6.0, -2.0]
    params = asked(logit_bias=((1, 5.0),), repetition_penalty=2.0)
    assert changed([0.0, 1.0, 2.0], sequence(1, params, prompt=[1])) == [0.0, 3.0, 2.0]


def test_a_bias_can_make_a_token_certain_and_rule_it_out() -> None:
    row = [0.0, 1.0, 2.0]
    assert token(row, sequence(1, asked(temperature=1.0, logit_bias=((1, 100.0),)))) == 1
    assert {token(row, sequence(1, asked(temperature=9.0, seed=n, logit_bias=((2, -100.0),)))) for n in range(40)} == {
        0,
        1,
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_before_min_tokens_are_there_no_stop_token_is_chosen_and_then_one_may_be(temperature: float) -> None:
    params = asked(min_tokens=2, stop_token_ids=(3,), temperature=temperature)
    row = [90.0, 1.0, 2.0, 99.0]
    assert [token(row, sequence(1, params, said=[1] * said)) in (1, 2) for said in range(4)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_an_end_token_is_never_chosen_where_it_is_ignored_but_a_stop_token_of_the_request_is(min_tokens: int) -> None:
    params = asked(ignore_eos=True, stop_token_ids=(3,), min_tokens=min_tokens)
    for said in range(5):
        after = changed([9.0, 1.0, 2.0, 3.0], sequence(1, params, said=[1] * said))
        assert after == [-math.inf, 1.0, 2.0, 3.0 if said >= min_tokens else -math.inf]


def test_ids_beyond_the_vocabulary_change_nothing() -> None:
    params = asked(
        stop_token_ids=(4, 2**31),
        min_tokens=5,
        logit_bias=((4, 9.0), (2**31, 9.0)),
        presence_penalty=1.0,
        logprobs=0,
    )
    one = sequence(1, params, prompt=[4, 2**31, 1])
    assert changed([5.0, 1.0, 2.0, 3.0], one) == [-math.inf, 0.0, 2.0, 3.0]
    (result,) = chosen(matrix([5.0, 1.0, 2.0, 3.0]), [one], frozenset({0, 4}))
    assert isinstance(result, SampledToken)
    assert result.token_id == 3


def test_what_no_step_could_carry_out_is_refused_before_one() -> None:
    with pytest.raises(AssertionError):
        Sampler(frozenset({EOS}), VOCAB).add_sequence(1, asked(logprobs=-5))


def test_negative_ids_change_nothing() -> None:
    params = asked(stop_token_ids=(-1, -99), min_tokens=5, logit_bias=((-1, 9.0), (-99, 9.0)))
    assert changed([5.0, 1.0, 2.0], sequence(1, params)) == [-math.inf, 1.0, 2.0]


# log probabilities


def test_log_probabilities_are_of_the_logits_as_the_model_gave_them() -> None:
    row = [1.0, 2.0, 3.0, 4.0]
    params = asked(
        logprobs=4,
        temperature=0.3,
        top_k=2,
        presence_penalty=2.0,
        logit_bias=((1, 50.0),),
        ignore_eos=True,
        min_tokens=1,
    )
    (result,) = chosen(matrix(row), [sequence(1, params, prompt=[3])])
    assert isinstance(result, SampledToken)
    whole = math.log(sum(map(math.exp, row)))
    assert result.logprob is not None
    assert (result.token_id, result.logprob.token_id) == (1, 1)
    assert result.logprob.logprob == pytest.approx(2.0 - whole, abs=1e-6)
    assert [token_id for token_id, _ in result.logprob.top] == [3, 2, 1, 0]
    assert [likelihood for _, likelihood in result.logprob.top] == pytest.approx([logit - whole for logit in row[::-1]])


@given(seed=SEEDS, width=st.integers(2, 400))
@settings(max_examples=60)
def test_the_probabilities_of_the_whole_vocabulary_sum_to_one_and_are_sorted(seed: int, width: int) -> None:
    (result,) = chosen(some_logits(seed, 1, width), [sequence(1, asked(logprobs=width, temperature=1.0))])
    assert isinstance(result, SampledToken)
    assert result.logprob is not None
    likelihoods = [likelihood for _, likelihood in result.logprob.top]
    assert sum(map(math.exp, likelihoods)) == pytest.approx(1.0, abs=1e-5)
    assert likelihoods == sorted(likelihoods, reverse=True)
    assert dict(result.logprob.top)[result.token_id] == result.logprob.logprob


@pytest.mark.parametrize(("logprobs", "reported"), [(None, None), (0, 0), (1, 1), (11, 11), (12, 12), (13, 12)])
def test_as_many_alternatives_are_reported_as_were_asked_for_and_there_are(
    logprobs: int | None, reported: int | None
) -> None:
    (result,) = chosen(some_logits(1, 1, VOCAB), [sequence(1, asked(logprobs=logprobs))])
    assert isinstance(result, SampledToken)
    assert (None if result.logprob is None else len(result.logprob.top)) == reported


def test_large_logits_do_not_overflow() -> None:
    (result,) = chosen(matrix([-3e38, 3e38, 2.9e38]), [sequence(1, asked(logprobs=2, temperature=1.0))])
    assert isinstance(result, SampledToken)
    assert result.logprob is not None
    assert (result.token_id, result.logprob.logprob) == (1, 0.0)


# bad logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize(
    ("bad", "logprobs"),
    [
        ([math.nan, 1.0, 2.0, 3.0, 4.0], None),
        ([math.nan, 1.0, 2.0, 3.0, 4.0], 2),
        ([math.nan] * 5, None),
        ([math.nan] * 5, 2),
        ([1.0, math.inf, 2.0, 3.0, 4.0], None),
        ([-math.inf] * 5, None),
    ],
)
def test_a_row_without_a_usable_maximum_ends_its_own_sequence_and_no_other(
    bad: list[float], temperature: float, top_k: int, logprobs: int | None
) -> None:
    good = [1.0, 5.0, 2.0, 3.0, 4.0]
    params = asked(temperature=temperature, top_k=top_k, logprobs=logprobs)
    three = [sequence(n, params) for n in (1, 2, 3)]
    first, second, third = chosen(matrix(good, bad, good), three)
    assert second is EngineFinishReason.BAD_LOGITS
    assert first == third == chosen(matrix(good), [sequence(4, params)])[0]


def test_tokens_that_the_model_rules_out_by_itself_are_no_fault() -> None:
    row = [-math.inf, 1.0, -math.inf, 2.0]
    drawn = {token(row, sequence(1, asked(temperature=1.0, seed=seed))) for seed in range(40)}
    assert drawn == {1, 3}


def test_a_row_in_which_everything_is_forbidden_ends_its_sequence() -> None:
    one = sequence(1, asked(min_tokens=1, stop_token_ids=(1,)))
    assert chosen(matrix([1.0, 2.0]), [one]) == [EngineFinishReason.BAD_LOGITS]


# lives


def test_a_sequence_begins_once_and_may_finish_without_having_begun() -> None:
    one = Sampler(frozenset({EOS}), VOCAB)
    one.remove_sequence(1)
    one.add_sequence(1, asked())
    with pytest.raises(AssertionError):
        one.add_sequence(1, asked())
    one.remove_sequence(1)
    one.add_sequence(1, asked())


def test_a_step_in_which_nobody_samples_gives_nothing() -> None:
    assert Sampler(frozenset(), VOCAB).sample(np.zeros((0, VOCAB), np.float32), []) == []


def test_equally_likely_tokens_are_drawn_alike_whatever_is_beside_them() -> None:
    for seed in range(50):
        logits = np.round(some_logits(seed, 2, 1_000))
        first, other = (sequence(k, asked(temperature=1.0, top_k=k, seed=seed)) for k in (5, 50))
        alone = chosen(logits[:1], [first])
        together = chosen(logits, [first, other])
        assert together[0] == alone[0], seed


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_row_of_which_log_probabilities_were_asked_disturbs_nobody(bad: float) -> None:
    logits = some_logits(3, 2, 100)
    logits[0] = bad
    results = chosen(logits, [sequence(n, asked(logprobs=2)) for n in (1, 2)])
    assert results[0] is EngineFinishReason.BAD_LOGITS
    assert isinstance(results[1], SampledToken)
