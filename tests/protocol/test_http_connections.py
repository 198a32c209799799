"""Which HTTP connections may be open, and which gives way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.http.http_connections import Bounds, Connections, Full, address_of


def test_one_that_comes_pushes_out_the_one_that_has_waited_longest() -> None:
    connections: Connections[int] = Connections(Bounds(2))
    assert [connections.come(number, "a") for number in (1, 2)] == [None, None]
    connections.work(1)
    connections.wait(1)
    assert connections.come(3, "b") == 2
    assert connections.come(4, "b") == 1


def test_of_a_full_address_one_of_its_own_gives_way() -> None:
    connections: Connections[int] = Connections(Bounds(10, per_address=2))
    for number, address in ((1, "other"), (2, "full"), (3, "full")):
        assert connections.come(number, address) is None
    assert connections.come(4, "full") == 2
    assert len(connections) == 3


def test_those_that_work_do_not_give_way() -> None:
    connections: Connections[int] = Connections(Bounds(2, per_address=1))
    connections.come(1, "a")
    connections.work(1)
    assert connections.come(2, "a") is Full.ADDRESS
    connections.come(3, "b")
    connections.work(3)
    assert connections.come(4, "c") is Full.ALL
    connections.leave(1)
    assert connections.come(5, "c") is None


def test_bounds_can_be_changed_and_0_is_none_for_an_address() -> None:
    connections: Connections[int] = Connections(Bounds(3, per_address=1))
    connections.come(1, "a")
    connections.bounds = Bounds(3)
    assert [connections.come(number, "a") for number in (2, 3, 4)] == [None, None, 1]


def test_clients_without_an_address_are_bounded_all_together_only() -> None:
    connections: Connections[int] = Connections(Bounds(2, per_address=1))
    assert [connections.come(number, "") for number in (1, 2, 3)] == [None, None, 1]


@given(
    st.lists(st.tuples(st.sampled_from(["come", "work", "wait", "leave"]), st.integers(0, 9), st.sampled_from("ab")))
)
def test_the_books_agree_and_hold_the_bounds_after_every_step(steps: list[tuple[str, int, str]]) -> None:
    bounds = Bounds(4, per_address=3)
    connections: Connections[int] = Connections(bounds)
    known: dict[int, str] = {}
    for act, number, address in steps:
        if act == "come" and number not in known:
            outcome = connections.come(number, address)
            if not isinstance(outcome, Full):
                known.pop(-1 if outcome is None else outcome, None)
                known[number] = address
        elif act != "come":
            getattr(connections, act)(number)
            if act == "leave":
                known.pop(number, None)
        connections.check_integrity()
        assert len(connections) == len(known) <= bounds.total
        assert max([0, *map(list(known.values()).count, "ab")]) <= bounds.per_address


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
    assert address_of(host) == address
