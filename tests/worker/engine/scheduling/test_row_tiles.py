"""A step is divided into passes where attention in tiles would otherwise cost more than a pass over the weights."""

from array import array
from collections.abc import Sequence as Listing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens
from tokenbus.worker.engine.scheduling.row_tiles import Pass, RowTiles
from tokenbus.worker.engine.scheduling.sequence import Sequence

TILES = RowTiles(rows=64, token_cost=0.0008, tile_cost=0.018)
"""Those of a 0.5B model."""
PASS = 8


def part(num_tokens: int, num_cells: int) -> ScheduledTokens:
    """The last `num_tokens` of a sequence with `num_cells`."""
    sequence = Sequence(1, array("I", [1]), engine_request.Sampling(max_tokens=1), frozenset())
    return ScheduledTokens(sequence, num_cells - num_tokens, num_tokens)


def sizes(passes: Listing[Pass]) -> list[tuple[list[int], int]]:
    return [([one.num_tokens for one in parts], padding) for parts, padding in passes]


def decodes(count: int, num_cells: int) -> list[ScheduledTokens]:
    return [part(1, num_cells) for _ in range(count)]


def test_streams_share_a_pass() -> None:
    assert sizes(TILES.divide(decodes(8, 4_000))) == [([1] * 8, 0)]


def test_streams_with_few_tokens_share_a_pass_with_a_prompt() -> None:
    assert sizes(TILES.divide([*decodes(4, 50), part(60, 60)])) == [([1, 1, 1, 1, 60], 0)]


def test_a_tile_of_a_prompt_does_not_go_through_the_cells_of_streams() -> None:
    assert sizes(TILES.divide([*decodes(4, 1_000), part(64, 2_000)])) == [([1] * 4, 0), ([64], 0)]


def test_more_streams_than_a_tile_has_tokens_are_computed_in_passes_without_tiles() -> None:
    assert sizes(TILES.divide(decodes(150, 500))) == [([1] * 63, 0), ([1] * 63, 0), ([1] * 24, 0)]


@pytest.mark.parametrize(
    ("num_tokens", "num_cells", "padding"),
    [(40, 500, 0), (40, 4_000, 24), (63, 4_000, 1), (20, 4_000, 0), (20, 20_000, 0), (28, 40_000, 36), (64, 4_000, 0)],
)
def test_a_tile_is_filled_up_if_that_takes_less_than_attention_token_by_token(
    num_tokens: int, num_cells: int, padding: int
) -> None:
    assert sizes(TILES.divide([part(num_tokens, num_cells)])) == [([num_tokens], padding)]
    assert TILES.pads(num_tokens, num_cells) == bool(padding)


def cost(parts: Listing[ScheduledTokens], padding: int) -> float:
    """The cost of a pass, by listing its tokens."""
    owners = [number for number, one in enumerate(parts) for _ in range(one.num_tokens)]
    if len(owners) + padding < TILES.rows:
        return PASS + len(owners) + sum(one.num_tokens * one.end for one in parts) * TILES.token_cost
    tiles = [set(owners[at : at + TILES.rows]) for at in range(0, len(owners), TILES.rows)]
    return PASS + len(owners) + padding + sum(parts[one].end for tile in tiles for one in tile) * TILES.tile_cost


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 20, 40, 63, 64, 65, 128, 300]), st.integers(300, 30_000)),
        min_size=1,
        max_size=100,
    )
)
@settings(max_examples=200)
def test_a_divided_step_has_all_its_parts_in_order_and_costs_no_more_than_one_pass(
    shares: list[tuple[int, int]],
) -> None:
    batch = [part(*share) for share in shares]
    passes = TILES.divide(batch)
    assert [one for parts, _ in passes for one in parts] == batch
    for parts, padding in passes:
        count = sum(one.num_tokens for one in parts)
        assert not padding or count + padding == TILES.rows
    assert sum(cost(*one) for one in passes) <= cost(batch, 0) + 1e-6
