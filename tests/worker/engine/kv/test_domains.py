"""Clients invent as many domains as they like: what is kept of one goes with its last checkpoint."""

import enum
import gc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.contract.contract import CheckpointSizes
from tokenbus.worker.engine.kv.checkpoint_tree import TokenRun
from tokenbus.worker.engine.kv.checkpoints import Checkpoints
from tokenbus.worker.engine.kv.ops import OpQueue
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain, Root

BLOCK = 4
TOKENS = array("I", range(100))


def make(num_states: int, max_count: int = 1_000) -> Checkpoints:
    return Checkpoints(CheckpointSizes(num_states * 50, state_bytes=10, token_bytes=1), BLOCK, max_count, OpQueue())


def num_nodes() -> int:
    """The nodes of trees that are still referred to."""
    gc.collect()
    return sum(isinstance(one, TokenRun) for one in gc.get_objects())


@pytest.mark.parametrize("num_states", [0, 1, 5])
def test_thousands_of_salts_leave_no_more_than_the_checkpoints_that_there_is_room_for(num_states: int) -> None:
    before, checkpoints = num_nodes(), make(num_states)
    for number in range(2_000):
        checkpoints.save(Domain("tenant", f"salt {number}"), TOKENS, 40, 0, None)
    checkpoints.check_integrity()
    assert len(checkpoints) == num_states
    assert num_nodes() - before == 2 * num_states  # each has a root and a run
    checkpoints.clear()
    checkpoints.check_integrity()
    assert num_nodes() == before


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 60), st.booleans()), max_size=60))
def test_no_domain_outlives_its_last_checkpoint(saves: list[tuple[str, int, bool]]) -> None:
    checkpoints = make(4, max_count=3)
    for salt, end, goes_on in saves:
        domain = Domain("tenant", salt)
        base = checkpoints.match(domain, TOKENS, end - 1).checkpoint if goes_on else None
        checkpoints.save(domain, TOKENS, end, 0, base)
        checkpoints.check_integrity()
    checkpoints.clear()
    checkpoints.check_integrity()
    assert not list(checkpoints.all())


# Blocks


class Use(enum.Enum):
    """What becomes of a sequence in a domain of its own."""

    ENDS = enum.auto()
    IS_ABORTED_BEFORE_ITS_FIRST_STEP = enum.auto()
    IS_DROPPED = enum.auto()
    IS_ASKED_FOR = enum.auto()
    IS_FETCHED = enum.auto()


@pytest.mark.parametrize("use", Use)
@pytest.mark.parametrize("host_blocks", [0, 6])
def test_thousands_of_salts_leave_no_more_than_the_blocks_that_there_is_room_for(use: Use, host_blocks: int) -> None:
    before, pool = num_roots(), BlockPool(8, BLOCK, 2, host_blocks=host_blocks)
    for number in range(1_000):
        _use(pool, Domain("tenant", f"salt {number}"), use)
        pool.cache.ops.take()
    pool.check_integrity()
    assert num_roots() - before <= 8 + host_blocks
    pool.clear()
    pool.check_integrity()
    assert num_roots() == before


def _use(pool: BlockPool, domain: Domain, use: Use) -> None:
    tokens = TOKENS[:10]
    assert pool.can_allocate(domain, tokens, len(tokens), 0)
    if use is Use.IS_ASKED_FOR:
        pool.cache.tree.known_path(domain, tokens)
        return
    if use is Use.IS_FETCHED:
        pool.put(domain, tokens, 0, 2)
        pool.put(domain, tokens, 3, 1)  # a block before is missing
        return
    sequence = pool.allocate(domain)
    num_computed = 0 if use is Use.IS_ABORTED_BEFORE_ITS_FIRST_STEP else len(tokens)
    if num_computed:
        sequence.reuse_prefix(tokens, 0)
        assert sequence.allocate_blocks(num_computed)
        sequence.cache_blocks(tokens, num_computed)
    if use is Use.IS_DROPPED:
        pool.drop(sequence, trusts_others=False)
    else:
        pool.free(sequence, tokens, num_computed)


def num_roots() -> int:
    gc.collect()
    return sum(isinstance(one, Root) for one in gc.get_objects())
