"""The sampler draws as a plain loop over sorted tokens would, repeats what a seed says, and harms no neighbour."""

import math
from array import array
from collections.abc import Sequence as Listing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.worker import contract
from tokenbus.worker.engine.draws import Matrix, draw_from_all, draw_from_top_k, draw_sorted, top_k_ids, uniform
from tokenbus.worker.engine.sampler import Sampler
from tokenbus.worker.engine.scheduling.plan import SampledToken
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

EOS, VOCAB = 0, 12
SEEDS = st.integers(0, 2**32 - 1)


def asked(**fields: object) -> contract.Sampling:
    return contract.Sampling(**({"max_tokens": 100} | fields))  # type: ignore[arg-type]


def sequence(
    seq_no: int, sampling: contract.Sampling, prompt: Listing[int] = (1,), said: Listing[int] = ()
) -> Sequence:
    """A sequence that has sampled some tokens already."""
    one = Sequence(seq_no, array("I", prompt), sampling, frozenset({EOS}))
    for token_id in said:
        one.num_computed = one.num_tokens
        one.append_token(token_id)
    return one


def matrix(*rows: Listing[float]) -> Matrix:
    return np.array(rows, np.float32)


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


def some_logits(seed: int, *shape: int) -> Matrix:
    return np.random.default_rng(seed).normal(0, 3, shape).astype(np.float32)


def reference(logits: Listing[float], sampling: contract.Sampling, place: float) -> tuple[int, float]:
    """The token, and how far the draw was from drawing another one: one after the other, with numbers as they are."""
    order = sorted(range(len(logits)), key=lambda token_id: -logits[token_id])
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [math.exp(logits[token_id] - logits[order[0]]) for token_id in order]
    whole = sum(weights)
    kept: list[int] = []
    before, margin = 0.0, 1.0
    for token_id, weight in zip(order, weights, strict=True):
        margin = min(margin, abs(before - sampling.top_p * whole) / whole) if sampling.top_p < 1 else margin
        margin = min(margin, abs(weight - sampling.min_p)) if sampling.min_p else margin
        if not kept or (before < sampling.top_p * whole and weight >= sampling.min_p):
            kept.append(token_id)
        before += weight
    heated = [math.exp((logits[token_id] - logits[order[0]]) / sampling.temperature) for token_id in kept]
    at, reached = place * sum(heated), 0.0
    for token_id, weight in zip(kept, heated, strict=True):
        reached += weight
        margin = min(margin, abs(reached - at) / sum(heated))
        if at < reached:
            return token_id, margin
    return kept[-1], margin


# the likeliest


@given(
    groups=st.integers(0, 40),
    beside=st.integers(-2, 2),
    rows=st.integers(1, 3),
    count=st.integers(1, 256),
    distinct=st.sampled_from([3, 1_000, 10**9]),
    seed=SEEDS,
)
@settings(max_examples=300)
def test_the_likeliest_are_those_of_a_full_sort(
    groups: int, beside: int, rows: int, count: int, distinct: int, seed: int
) -> None:
    """`distinct` bounds how many values there are: with few many are equal, and any of them will do."""
    width = max(1, 64 * groups + beside)
    count = min(count, width)
    logits = np.random.default_rng(seed).integers(0, distinct, (rows, width)).astype(np.float32)
    ids = top_k_ids(logits, count)
    assert ids.shape == (rows, count)
    assert all(len(set(row)) == count for row in ids.tolist())
    assert np.array_equal(np.take_along_axis(logits, ids, axis=1), -np.sort(-logits, axis=1)[:, :count])


@pytest.mark.parametrize("width", [128 * 256 - 1, 128 * 256, 128 * 256 + 1, 128 * 256 + 65])
def test_the_likeliest_of_a_row_around_the_width_where_groups_are_formed_are_those_of_a_full_sort(width: int) -> None:
    logits = some_logits(width, 2, width)
    logits[:, -1] = 100.0
    assert np.array_equal(top_k_ids(logits, 256), np.argsort(-logits, axis=1)[:, :256])


def test_the_likeliest_may_all_lie_in_one_group() -> None:
    logits = some_logits(1, 1, 64 * 64)
    logits[0, 640:672] += 1_000
    assert np.array_equal(top_k_ids(logits, 16), np.argsort(-logits, axis=1)[:, :16])


# greedy


def test_without_a_temperature_the_likeliest_token_is_chosen_in_every_row() -> None:
    logits = some_logits(5, 20, 333)
    sequences = [sequence(n, asked(top_k=n, top_p=0.5, seed=n)) for n in range(20)]
    assert chosen(logits, sequences) == [SampledToken(int(token_id)) for token_id in logits.argmax(axis=1)]


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = some_logits(6, 20, 333)
    sequences = [sequence(n, asked(top_k=1, temperature=5.0, seed=n)) for n in range(20)]
    assert chosen(logits, sequences) == [SampledToken(int(token_id)) for token_id in logits.argmax(axis=1)]


# drawing


@given(
    seed=SEEDS,
    width=st.integers(2, 90),
    place=st.floats(0, 1, exclude_max=True),
    temperature=st.floats(0.05, 3.0),
    top_k=st.integers(0, 95),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)
@settings(max_examples=500)
def test_a_draw_is_that_of_the_reference(
    seed: int, width: int, place: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = some_logits(seed, 1, width)
    params = asked(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected, margin = reference(logits[0].tolist(), params, place)
    if margin < 1e-9:  # where the last bits of a sum decide
        return
    assert draw_from_all(logits[0], params, place) == expected
    if 0 < top_k <= width:
        assert draw_from_top_k(logits, [params], [place]).tolist() == [expected]


@given(
    seed=SEEDS,
    width=st.sampled_from([3, 2_048, 2_049, 5_000, 40_000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0]),
    distinct=st.sampled_from([3, 300, 10**9]),
    ruled_out=st.sampled_from([-math.inf, -3e38, -1e9, -100.0, 0.0]),
    place=st.floats(0, 1, exclude_max=True),
    temperature=st.floats(0.05, 3.0),
    top_k=st.sampled_from([0, 0, 2, 257, 4_000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)
@settings(max_examples=150)
def test_a_wide_draw_is_that_of_a_full_sort(
    seed: int,
    width: int,
    spread: float,
    distinct: int,
    ruled_out: float,
    place: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    """`distinct` bounds how many values there are, and a third of the tokens is less likely by `ruled_out`."""
    rng = np.random.default_rng(seed)
    row = (rng.normal(0, spread, min(width, distinct)).astype(np.float32))[rng.integers(0, min(width, distinct), width)]
    row[rng.random(width) < 1 / 3] += np.float32(ruled_out)
    row[0] = 20.0 if ruled_out and np.isneginf(row.max()) else row[0]
    params = asked(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert draw_from_all(row, params, place) == draw_sorted(row, params, place)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_wide_row_is_drawn_from_without_sorting_it(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_sizes: list[int] = []
    argsort = np.argsort

    def noting(values: Any, *arguments: Any, **named: Any) -> Any:
        sorted_sizes.append(values.size)
        return argsort(values, *arguments, **named)

    monkeypatch.setattr(np, "argsort", noting)
    row = some_logits(1, 150_000)
    for place in range(20):
        draw_from_all(row, asked(temperature=1.0, top_p=top_p), (place + 0.5) / 20)
    assert max(sorted_sizes) < 4_000


@given(seed=SEEDS, top_k=st.integers(1, 256), temperature=st.floats(0.1, 3.0), top_p=st.floats(0.05, 1.0))
@settings(max_examples=100)
def test_rows_drawn_together_get_the_tokens_that_each_gets_alone(
    seed: int, top_k: int, temperature: float, top_p: float
) -> None:
    logits = some_logits(seed, 4, 1_000)
    rows = [asked(temperature=temperature + n, top_k=top_k, top_p=top_p, seed=n) for n in range(4)]
    places = [uniform(seed, n) for n in range(4)]
    together = draw_from_top_k(logits, rows, places).tolist()
    assert together == [draw_from_all(row, one, place) for row, one, place in zip(logits, rows, places, strict=True)]


@pytest.mark.parametrize("top_k", [256, 257])
def test_the_last_narrow_top_k_and_the_first_wide_one_draw_as_the_reference_does(top_k: int) -> None:
    logits = some_logits(3, 1, 2_000) / 10
    params = asked(temperature=2.0, top_k=top_k, seed=11)
    for said in range(20):
        one = sequence(1, params, said=[5] * said)
        expected, _ = reference(logits[0].tolist(), params, uniform(11, said))
        assert token(logits[0], one) == expected


def test_top_p_looks_at_the_distribution_before_the_temperature() -> None:
    row = [math.log(share) for share in (0.5, 0.3, 0.2)]
    for top_p, kept in ((0.5, {0}), (0.51, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2})):
        params = asked(temperature=100.0, top_p=top_p)
        assert {draw_from_all(matrix(row)[0], params, place / 50) for place in range(50)} == kept


@pytest.mark.parametrize(("top_p", "kept"), [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (1.0, 4)])
def test_top_p_keeps_tokens_until_their_sum_reaches_it_and_always_one(top_p: float, kept: int) -> None:
    params = asked(temperature=1.0, top_p=top_p)
    assert len({draw_from_all(matrix([3.0] * 4)[0], params, place / 50) for place in range(50)}) == kept


def test_the_likeliest_is_left_where_top_p_leaves_nothing() -> None:
    params = asked(temperature=9.0, top_p=0.0)
    assert {draw_from_all(matrix([1.0, 3.0, 2.0])[0], params, place / 50) for place in range(50)} == {1}


def test_a_place_on_the_edge_of_two_tokens_is_the_second_ones() -> None:
    row, params = matrix([3.0, 3.0])[0], asked(temperature=1.0)
    first, edge, second = (draw_from_all(row, params, place) for place in (0.499, 0.5, 0.501))
    assert first != edge == second


def test_top_p_shares_what_top_k_has_left() -> None:
    row = [math.log(share) for share in (0.4, 0.3, 0.2, 0.1)]
    for top_k, kept in ((2, {0}), (4, {0, 1})):
        params = asked(temperature=1.0, top_k=top_k, top_p=0.55)
        assert {draw_from_all(matrix(row)[0], params, place / 50) for place in range(50)} == kept


def test_min_p_is_a_share_of_the_top_k_ids() -> None:
    row = [math.log(share) for share in (0.5, 0.3, 0.2)]
    for min_p, kept in ((0.39, {0, 1, 2}), (0.41, {0, 1}), (0.59, {0, 1}), (0.61, {0}), (1.0, {0})):
        params = asked(temperature=1.0, min_p=min_p)
        assert {draw_from_all(matrix(row)[0], params, place / 50) for place in range(50)} == kept


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


def test_a_number_is_drawn_from_zero_up_to_one_and_is_the_same_for_the_same_seed_and_place() -> None:
    numbers = [uniform(seed, place) for seed in range(50) for place in range(50)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert numbers == [uniform(seed, place) for seed in range(50) for place in range(50)]
    assert abs(sum(numbers) / len(numbers) - 0.5) < 5 * math.sqrt(1 / 12 / len(numbers))


@pytest.mark.parametrize("top_k", [0, 5])
def test_tokens_are_drawn_as_often_as_their_probabilities_say(top_k: int) -> None:
    shares, draws = [0.5, 0.25, 0.15, 0.08, 0.02], 20_000
    row = matrix([math.log(share) for share in shares])
    params = asked(temperature=1.0, top_k=top_k)
    if top_k:
        drawn = draw_from_top_k(
            row.repeat(draws, axis=0), [params] * draws, [uniform(7, n) for n in range(draws)]
        ).tolist()
    else:
        drawn = [draw_from_all(row[0], params, uniform(7, n)) for n in range(draws)]
    for token_id, share in enumerate(shares):
        sigma = math.sqrt(draws * share * (1 - share))
        assert abs(drawn.count(token_id) - draws * share) < 5 * sigma


def test_a_temperature_changes_how_often() -> None:
    shares, draws, temperature = [0.6, 0.3, 0.1], 20_000, 2.0
    row = matrix([math.log(share) for share in shares])[0]
    drawn = [draw_from_all(row, asked(temperature=temperature), uniform(8, n)) for n in range(draws)]
    heated = [share ** (1 / temperature) for share in shares]
    for token_id, weight in enumerate(heated):
        share = weight / sum(heated)
        assert abs(drawn.count(token_id) - draws * share) < 5 * math.sqrt(draws * share * (1 - share))


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
