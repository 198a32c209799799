"""Which HTTP connections may be open, and which gives way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.http.connection_table import ConnectionLimits, ConnectionTable, client_address
from tokenbus.protocol.http.refusals import TOO_MANY, TOO_MANY_PER_ADDRESS, HttpRefusal


def test_one_that_comes_pushes_out_the_one_that_has_waited_longest() -> None:
    connections: ConnectionTable[int] = ConnectionTable(ConnectionLimits(2))
    assert [connections.add(number, "a") for number in (1, 2)] == [None, None]
    connections.mark_busy(1)
    connections.mark_idle(1)
    assert connections.add(3, "b") == 2
    assert connections.add(4, "b") == 1


def test_of_a_full_address_one_of_its_own_gives_way() -> None:
    connections: ConnectionTable[int] = ConnectionTable(ConnectionLimits(10, per_address=2))
    for number, address in ((1, "other"), (2, "full"), (3, "full")):
        assert connections.add(number, address) is None
    assert connections.add(4, "full") == 2
    assert len(connections) == 3


def test_those_that_work_do_not_give_way() -> None:
    connections: ConnectionTable[int] = ConnectionTable(ConnectionLimits(2, per_address=1))
    connections.add(1, "a")
    connections.mark_busy(1)
    assert connections.add(2, "a") is TOO_MANY_PER_ADDRESS
    connections.add(3, "b")
    connections.mark_busy(3)
    assert connections.add(4, "c") is TOO_MANY
    connections.remove(1)
    assert connections.add(5, "c") is None


def test_bounds_can_be_changed_and_0_is_none_for_an_address() -> None:
    connections: ConnectionTable[int] = ConnectionTable(ConnectionLimits(3, per_address=1))
    connections.add(1, "a")
    connections.limits = ConnectionLimits(3)
    assert [connections.add(number, "a") for number in (2, 3, 4)] == [None, None, 1]


def test_clients_without_an_address_are_bounded_all_together_only() -> None:
    connections: ConnectionTable[int] = ConnectionTable(ConnectionLimits(2, per_address=1))
    assert [connections.add(number, "") for number in (1, 2, 3)] == [None, None, 1]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "mark_busy", "mark_idle", "remove"]), st.integers(0, 9), st.sampled_from("ab")
        )
    )
)
def test_the_books_agree_and_hold_the_bounds_after_every_step(steps: list[tuple[str, int, str]]) -> None:
    limits = ConnectionLimits(4, per_address=3)
    connections: ConnectionTable[int] = ConnectionTable(limits)
    known: dict[int, str] = {}
    for act, number, address in steps:
        if act == "add" and number not in known:
            outcome = connections.add(number, address)
            if not isinstance(outcome, HttpRefusal):
                known.pop(-1 if outcome is None else outcome, None)
                known[number] = address
        elif act != "add":
            getattr(connections, act)(number)
            if act == "remove":
                known.pop(number, None)
        connections.check_integrity()
        assert len(connections) == len(known) <= limits.total
        assert max([0, *map(list(known.values()).count, "ab")]) <= limits.per_address


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("/run/socket", ""),
    ],
)
def test_an_address_of_ipv6_counts_with_its_network(host: str, address: str) -> None:
    assert client_address(host) == address
