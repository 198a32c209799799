"""A draw finds the token that a plain loop over sorted tokens finds, mostly without sorting."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sampling import asked, matrix, reference, some_logits
from tokenbus.worker.engine.device.draws import draw_from_all, draw_from_top_k, draw_sorted, top_k_ids, uniform

SEEDS = st.integers(0, 2**32 - 1)


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
