"""Tries a fault of every kind before every message of one exchange, and checks what the simplest client sees of it.

Users of the library see nothing of any of them. `make test` tries a tenth of the messages, always the same ones,
`make test-long` a fifth, and TOKENBUS_EVERY_MESSAGE=all every one."""

import itertools
import os
import zlib
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.sim.exchange import Exchange
from tests.sim.world import world
from tokenbus.protocol.wire import errors

ALL = os.environ.get("TOKENBUS_EVERY_MESSAGE") == "all"


class Fault(NamedTuple):
    name: str
    strike: Callable[[Exchange], None]
    expect: Callable[[Exchange], None]
    """Asserts what the simple client has received of its stream, in addition to text without a hole."""


def everything(exchange: Exchange) -> None:
    assert exchange.simply_asked.is_whole


def everything_or_an_error_if_not_sealed(exchange: Exchange) -> None:
    asked = exchange.simply_asked
    if not asked.is_whole:
        assert not exchange.record.is_sealed(asked.inbox)
        assert asked.terminal
        assert asked.terminal.error
        assert asked.terminal.error.code is errors.Code.WORKER_LOST


def everything_if_placed(exchange: Exchange) -> None:
    asked = exchange.simply_asked
    if not asked.is_whole:
        assert not exchange.record.was_placed(asked.inbox)
        assert asked.terminal is None


def anything(exchange: Exchange) -> None:
    """Allows everything: a request that no process holds any more ends in silence, and holes, where they are allowed,
    can't be told from that."""


FAULTS = (
    Fault("worker_killed", Exchange.kill_worker, everything),
    Fault("write_torn", lambda exchange: exchange.kill_worker(lingers=False), everything_or_an_error_if_not_sealed),
    Fault("worker_cut", lambda exchange: exchange.cut_worker(lingers=True), everything),
    Fault("worker_cut_and_messages_lost", lambda exchange: exchange.cut_worker(lingers=False), anything),
    Fault("worker_paused", Exchange.pause_worker, everything),
    Fault("router_cut", Exchange.cut_router, everything_if_placed),
    Fault("router_killed", Exchange.kill_router, everything_if_placed),
    Fault("worker_and_router_killed", Exchange.kill_worker_and_router, anything),
    Fault("worker_drained", Exchange.drain_worker, everything),
    Fault("router_stopped", Exchange.stop_router, everything),
    Fault("router_and_worker_stopped", Exchange.stop_router_and_worker, everything),
    Fault("clients_cut", Exchange.cut_clients, anything),
)


_SEED = 5
"""One by which the worker that faults strike has the simple client's stream too, as the first test makes sure."""


def is_chosen(fault: Fault, number: int, one_in: int) -> bool:
    return ALL or zlib.crc32(f"{fault.name} {number}".encode()) % one_in == 0


def has_message(fault: Fault, number: int) -> bool:
    """Tries a fault before the n-th message; returns False if there are fewer."""
    with world(seed=_SEED) as made:
        exchange = Exchange(made)
        try:
            if exchange.play(fault.strike, number):
                exchange.settle()
                exchange.check()
                fault.expect(exchange)
        except AssertionError as error:
            error.add_note(f"{fault.name} before message {number}, {exchange.struck_by}: {exchange!r}")
            raise
        return exchange.struck_at is not None


def test_without_a_fault_all_comes_from_its_first_worker_which_faults_strike_for_the_simple_client() -> None:
    with world(seed=_SEED) as made:
        exchange = Exchange(made)
        assert not exchange.play(Exchange.kill_worker, 1_000)
        exchange.check()
        everything(exchange)
        assert all(set(heard.workers) == {1} for heard in exchange.library.heard.values())
        assert [heard.workers for heard in exchange.simple_client.heard.values()] == [{1: exchange.worker.name}]


@pytest.mark.parametrize("one_in", [20, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_stream_outlives_a_fault_before_any_message(fault: Fault, one_in: int) -> None:
    numbers = (number for number in itertools.count(1) if is_chosen(fault, number, one_in))
    tried = len(list(itertools.takewhile(lambda number: has_message(fault, number), numbers)))
    assert tried > 1
