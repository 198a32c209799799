"""What clients have asked to keep goes last, within their share, and what a session alone has used goes first when it
ends."""

import pytest

from tests.support.block_cache import ACME, Cache, hashes, ids
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.kv.retention import CacheHint, RetentionLimits

OTHERS = Domain("others")
KEPT = CacheHint(None, 60.0)


def of(session: str, ttl_s: float | None = None, tenant: str = "acme") -> CacheHint:
    return CacheHint((tenant, session), ttl_s)


def is_cached(cache: Cache, text: str, domain: Domain = ACME) -> bool:
    return len(cache.pool.cache.tree.known_path(domain, ids(text))) == len(hashes(text))


def test_what_is_kept_goes_last_and_goes_all_the_same() -> None:
    cache = Cache(total_blocks=8)
    cache.run("aaaabbbb", hint=KEPT)
    cache.run("ccccdddd")
    cache.fill(6)
    assert is_cached(cache, "aaaabbbb")
    assert not is_cached(cache, "cccc")
    cache.fill(7)
    assert not is_cached(cache, "aaaabbbb"), "of a path, its end goes first"
    assert is_cached(cache, "aaaa")
    cache.fill(8)
    assert len(cache.pool.prefixes.retention) == 0


def test_it_is_kept_until_its_time_is_over_or_longer_if_somebody_asks_again() -> None:
    cache = Cache(total_blocks=8)
    cache.run("aaaa", hint=CacheHint(None, 10.0))
    cache.run("bbbb", hint=CacheHint(None, 20.0))
    cache.pool.prefixes.retention.expire(9.0)
    assert len(cache.pool.prefixes.retention) == 2
    cache.run("bbbb", hint=CacheHint(None, 5.0))
    cache.pool.prefixes.retention.expire(15.0)
    assert len(cache.pool.prefixes.retention) == 1
    cache.pool.prefixes.retention.expire(20.0)
    assert len(cache.pool.prefixes.retention) == 0
    cache.pool.check_integrity()


def test_a_wish_is_cut_to_the_longest_time() -> None:
    cache = Cache(limits=RetentionLimits(1.0, max_ttl_s=5.0))
    cache.run("aaaa", hint=CacheHint(None, 1e6))
    cache.pool.prefixes.retention.expire(5.0)
    assert len(cache.pool.prefixes.retention) == 0


def test_a_tenant_keeps_its_share_and_of_it_what_was_used_last() -> None:
    cache = Cache(total_blocks=16, num_lanes=9)
    for text in ("aaaabbbb", "ccccdddd", "eeeeffff"):
        cache.run(text, hint=KEPT)
    assert len(cache.pool.prefixes.retention) == 4
    kept = {block.hash for block in cache.pool.cache.tree.all_blocks() if block.kept_until}
    assert kept == {*hashes("ccccdddd"), *hashes("eeeeffff")}


def test_of_a_path_that_is_longer_than_the_share_its_beginning_is_kept() -> None:
    cache = Cache(total_blocks=16)
    cache.run("aaaabbbbccccddddeeee", hint=KEPT)
    assert [block.hash for block in cache.pool.cache.tree.all_blocks() if block.kept_until][::-1] == hashes(
        "aaaabbbbccccdddd"
    )


def test_all_tenants_together_keep_a_half() -> None:
    cache = Cache(total_blocks=16, num_lanes=9, limits=RetentionLimits(0.4))
    for name in ("a", "b", "c"):
        for text in ("aaaabbbb", "ccccdddd"):
            cache.run(text, domain=Domain(name), hint=KEPT)
    assert len(cache.pool.prefixes.retention) == 8


def test_nobody_keeps_anything_where_the_share_is_0() -> None:
    cache = Cache(limits=RetentionLimits(0.0))
    cache.run("aaaabbbb", hint=KEPT)
    assert len(cache.pool.prefixes.retention) == 0


def test_a_session_that_has_ended_goes_before_everything_else() -> None:
    cache = Cache(total_blocks=8)
    cache.run("aaaa")
    cache.run("bbbbcccc", hint=of("s", 60.0))
    cache.pool.retain_session(("acme", "s"), 0)
    assert len(cache.pool.prefixes.retention) == 0
    cache.fill(7)
    assert not is_cached(cache, "bbbb")
    assert is_cached(cache, "aaaa")


def test_its_end_spares_what_others_have_used() -> None:
    cache = Cache(total_blocks=8, num_lanes=6)
    cache.run("aaaabbbb", hint=of("mine"))
    cache.run("aaaacccc", hint=of("theirs"))
    cache.run("ddddeeee", hint=of("mine"))
    cache.run("dddd")  # by a request without a session
    cache.run("ffff")
    cache.pool.retain_session(("acme", "mine"), 0)
    cache.fill(4)
    assert [is_cached(cache, text) for text in ("aaaabbbb", "ddddeeee")] == [False, False]
    assert all(is_cached(cache, text) for text in ("aaaacccc", "dddd", "ffff"))


def test_its_end_spares_what_still_runs() -> None:
    cache = Cache(total_blocks=8)
    cache.run("aaaabbbb", hint=of("s"))
    cache.allocate(1, "aaaabbbbccccd", hint=of("s"))
    cache.reuse_prefix(1)
    cache.pool.retain_session(("acme", "s"), 0)
    cache.compute(1, 13)
    cache.free(1)
    assert is_cached(cache, "aaaabbbbcccc")


@pytest.mark.parametrize("session", [("acme", "t"), ("others", "s"), ("", "s"), ("", "")])
@pytest.mark.parametrize("ttl_s", [0.0, 60.0])
def test_a_hint_for_another_session_or_tenant_changes_nothing(session: tuple[str, str], ttl_s: float) -> None:
    cache = Cache(total_blocks=8)
    cache.run("aaaabbbb", hint=of("s", 60.0))
    cache.run("cccc", domain=OTHERS)
    before = list(cache.pool.cache._evictable), len(cache.pool.prefixes.retention)
    cache.pool.retain_session(session, ttl_s)
    assert (list(cache.pool.cache._evictable), len(cache.pool.prefixes.retention)) == before


def test_a_session_is_kept_with_all_that_leads_to_it() -> None:
    cache = Cache(total_blocks=32, num_lanes=6)
    cache.run("aaaa")
    cache.run("aaaabbbbc", hint=of("s"))
    cache.run("dddd", hint=of("s"))
    cache.run("eeee")
    cache.pool.retain_session(("acme", "s"), 60.0)
    assert {block.tokens for block in cache.pool.cache.tree.all_blocks() if block.kept_until} == {
        ids(text).tobytes() for text in ("aaaa", "bbbb", "c", "dddd")
    }


def test_copies_in_host_memory_are_kept_and_go_first_too() -> None:
    cache = Cache(total_blocks=8, num_lanes=6, host_blocks=4, writes_through=True)

    def save() -> None:
        cache.pool.cache.host.set_limits(offloads=99, onloads=0)
        cache.pool.cache.write_through()

    cache.run("aaaa", hint=of("old", 60.0))
    cache.run("bbbb", hint=of("s"))
    cache.run("cccc")
    cache.run("dddd")
    save()
    cache.pool.retain_session(("acme", "s"), 0)
    assert cache.pool.cache.host.first.tokens == ids("bbbb").tobytes()
    cache.run("eeee")
    save()
    assert [block.tokens for block in cache.pool.cache.host] == [
        ids(text).tobytes() for text in ("cccc", "dddd", "eeee", "aaaa")
    ]
