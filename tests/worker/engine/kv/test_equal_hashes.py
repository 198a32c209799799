"""Clients can make different blocks that have one hash. Routers are told of it once, and until none of them is left."""

import pytest

from tests.support.block_cache import Cache, hashes
from tests.worker.engine.kv.test_domains import TOKENS, make
from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.prefix_tree import Domain, KvEvents, StoredBlock

ROOT = 7


@pytest.fixture(autouse=True)
def _salts_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "root_hash", lambda domain: ROOT)


def salted(number: int) -> Domain:
    return Domain("acme", f"salt {number}")


def test_a_hash_comes_with_the_first_block_that_has_it_and_goes_with_the_last() -> None:
    cache, (a, b) = Cache(total_blocks=4), hashes("aaaabbbb")
    for number in range(2):
        cache.run("aaaabbbb", salted(number))
        assert cache.reused("aaaabbbb", salted(number)) == 7
        cache.free(100)
    assert cache.events() == KvEvents([], [StoredBlock(ROOT, a), StoredBlock(a, b)])
    gone = []
    for num_blocks in (1, 2, 3, 4):
        cache.fill(num_blocks)
        gone.append(cache.events())
    assert gone == [KvEvents([], []), KvEvents([], []), KvEvents([b], []), KvEvents([a], [])]


def test_one_that_is_back_before_a_report_is_reported_as_if_it_had_never_left() -> None:
    cache, (a,) = Cache(total_blocks=2), hashes("aaaa")
    cache.run("aaaa", salted(0))
    cache.run("aaaa", salted(1))
    cache.fill(2)
    assert cache.events() == KvEvents([], [])
    cache.free(101)
    cache.run("aaaa", salted(0))
    cache.events()
    cache.fill(2)
    cache.free(101)
    cache.run("aaaa", salted(1))
    assert cache.events() == KvEvents([a], [StoredBlock(ROOT, a)])


def test_the_same_holds_for_blocks_that_end_at_checkpoints() -> None:
    checkpoints = make(2)
    for number in range(3):  # the third takes the place of the first
        checkpoints.save(salted(number), TOKENS, 8, 0, None)
        checkpoints.check_integrity()
    parent, name = block_hash.block_hashes_of_bytes(block_hash.pack_token_ids(TOKENS[:8]), 4, ROOT)
    assert checkpoints.take_events() == KvEvents([], [StoredBlock(parent, name)])
    checkpoints.clear()
    assert checkpoints.take_events() == KvEvents([name], [])
