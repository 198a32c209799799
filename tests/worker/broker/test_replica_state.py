"""The states of a replica follow from what happens to it, in whatever order that is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.wire import messages
from tokenbus.worker.broker.replica_state import ReplicaEvent, ReplicaState, after

E, S = ReplicaEvent, ReplicaState
EVENTS = st.sampled_from(E)


def states_after(*events: ReplicaEvent) -> list[ReplicaState]:
    """The states of a new replica to which these events happen."""
    states = [S.STARTING]
    for event in events:
        states.append(after(states[-1], event))
    return states


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((E.ENGINE_SERVES, E.ENGINE_DIED, E.ENGINE_SERVES), (S.READY, S.RESTARTING, S.READY)),
        ((E.UNLOADED, E.LOAD, E.ENGINE_SERVES), (S.UNLOADED, S.STARTING, S.READY)),
        ((E.ENGINE_SERVES, E.UNLOAD, E.ENGINE_DIED, E.UNLOADED), (S.READY, S.UNLOADING, S.UNLOADING, S.UNLOADED)),
        ((E.ENGINE_SERVES, E.DRAIN, E.LEAVE, E.STOP), (S.READY, S.DRAINING, S.LEAVING, S.STOPPED)),
    ],
    ids=["an engine that dies", "a load", "an unload", "a stop"],
)
def test_a_replica_has_these_lives(events: tuple[ReplicaEvent, ...], expected: tuple[ReplicaState, ...]) -> None:
    assert states_after(*events)[1:] == list(expected)


def test_an_engine_that_is_replaced_while_its_model_is_unloaded_does_not_make_it_ready() -> None:
    assert states_after(E.ENGINE_SERVES, E.UNLOAD, E.ENGINE_DIED, E.ENGINE_SERVES)[-1] is S.UNLOADING


@given(st.lists(EVENTS, max_size=12))
def test_only_an_engine_that_serves_makes_a_replica_ready(events: list[ReplicaEvent]) -> None:
    states = states_after(*events)
    for before, event, now in zip(states, events, states[1:], strict=False):
        assert now is not S.READY or before is S.READY or event is E.ENGINE_SERVES


@given(st.lists(EVENTS, max_size=12))
def test_a_replica_that_is_ending_never_accepts_anything_again(events: list[ReplicaEvent]) -> None:
    order = [S.DRAINING, S.LEAVING, S.STOPPED]
    ending = [state for state in states_after(*events, E.DRAIN, *events) if state.is_ending]
    assert ending == sorted(ending, key=order.index)
    assert all(state.is_ending for state in states_after(*events, E.DRAIN, *events)[len(events) + 1 :])


@pytest.mark.parametrize("state", S)
def test_every_state_can_be_reached_and_left_for_good(state: ReplicaState) -> None:
    reached = {S.STARTING}
    while more := {after(one, event) for one in reached for event in E} - reached:
        reached |= more
    assert state in reached
    assert after(state, E.STOP) is S.STOPPED


def test_routers_that_know_nothing_of_loadable_see_a_worker_that_drains() -> None:
    seen = {state: state.on_wire for state in S if state.is_loadable}
    assert seen == dict.fromkeys((S.UNLOADING, S.UNLOADED), messages.WorkerState.DRAINING)
    assert {state.on_wire for state in S} == set(messages.WorkerState)
