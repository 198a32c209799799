"""Leases of blocks: few at a time, gone when nobody reads."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.contract.contract import CachedPrefix
from tokenbus.worker.kv_exchange.holder import LEASE_S, MAX_LEASES, UNREAD_S, Leases

PREFIX = CachedPrefix("acme", "", (), b"\1\0\0\0")


def test_a_lease_of_which_its_reader_never_hears_ends_soon() -> None:
    leases = Leases()
    leases.grant(PREFIX, 0, 3, now=0.0)
    leases.expire(UNREAD_S - 0.1)
    assert len(leases) == 1
    leases.expire(UNREAD_S)
    assert len(leases) == 0


def test_a_lease_that_is_not_read_any_more_nor_released_ends() -> None:
    leases = Leases()
    lease = leases.grant(PREFIX, 0, 3, now=0.0)
    assert leases.use(lease.name, 0.0) == lease
    assert leases.use(lease.name, LEASE_S - 0.1) == lease
    assert leases.use(lease.name, 2 * LEASE_S - 0.2) == lease
    assert leases.use(lease.name, 3 * LEASE_S) is None
    assert len(leases) == 0


def test_a_lease_that_is_released_is_gone_and_others_stay() -> None:
    leases = Leases()
    one, other = leases.grant(PREFIX, 0, 3, 0.0), leases.grant(PREFIX, 0, 3, 0.0)
    leases.end(one.name)
    leases.end("unknown")
    assert (leases.use(one.name, 1.0), leases.use(other.name, 1.0)) == (None, other)


@given(st.lists(st.tuples(st.sampled_from(["grant", "use", "end", "wait"]), st.integers(0, 5)), max_size=40))
def test_never_more_than_two_and_none_that_was_not_used_lately(steps: list[tuple[str, int]]) -> None:
    leases, now, used_at = Leases(), 0.0, dict[str, float]()
    names: list[str] = []
    for what, number in steps:
        name = names[number % len(names)] if names else "?"
        leases.expire(now)
        if what == "grant" and len(leases) < MAX_LEASES:
            names.append(leases.grant(PREFIX, 0, 1, now).name)
            assert leases.use(names[-1], now) is not None
            used_at[names[-1]] = now
        elif what == "use":
            expected = name in used_at and now - used_at[name] < LEASE_S
            assert (leases.use(name, now) is not None) == expected
            used_at |= {name: now} if expected else {}
        elif what == "end":
            leases.end(name)
            used_at.pop(name, None)
        else:
            now += number
        assert len(leases) <= MAX_LEASES
