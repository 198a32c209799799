"""The states of a replica, as one table. A card shows the state; what a worker accepts follows from it.

                          engine serves                        engine died
          ┌─▶ STARTING ──────────────────▶ READY ──────────────────────────────▶ RESTARTING
          │      │                         │   ▲          engine serves              │ │
          │      │ unloaded         unload │   └─────────────────────────────────────┘ │
     load │      ▼                         ▼                                           │
          └─ UNLOADED ◀────────────── UNLOADING ◀──────────────────────────────────────┤ unload
                 ▲        unloaded                                                     │
                 └─────────────────────────────────────────────────────────────────────┘ unloaded

     each of these ── drain ──▶ DRAINING ── leave ──▶ LEAVING        every state ── stop ──▶ STOPPED

An event for which a state has no arrow changes nothing: an engine that dies while the replica is unloading or draining
is replaced, so that its streams end properly, and the replica accepts no more than before."""

import enum
import functools
from typing import NamedTuple

from tokenbus.protocol.wire import messages
from tokenbus.worker.contract import contract


class ReplicaState(enum.Enum):
    """The state of one replica."""

    STARTING = "starting"
    """The first engine, or that of a model on demand, is being started."""
    READY = "ready"
    RESTARTING = "restarting"
    """The engine has died, and the next one is being started."""
    UNLOADING = "unloading"
    """The model is to make room. Its engine accepts nothing more, and ends with its last stream."""
    UNLOADED = "unloaded"
    """There is no engine until the model is requested."""
    DRAINING = "draining"
    """The worker is about to leave. Running streams end here."""
    LEAVING = "leaving"
    """Routers take the streams that are still open."""
    STOPPED = "stopped"

    @property
    def is_loadable(self) -> bool:
        """Whether requests wait in routers until the model is loaded."""
        return self in (ReplicaState.UNLOADING, ReplicaState.UNLOADED)

    @property
    def is_ending(self) -> bool:
        """Whether the worker accepts nothing more, for good."""
        return self in (ReplicaState.DRAINING, ReplicaState.LEAVING, ReplicaState.STOPPED)

    @functools.cached_property
    def on_wire(self) -> messages.WorkerState:
        """The state as cards and events show it. Routers that know nothing of `loadable` see a draining worker."""
        return messages.WorkerState.DRAINING if self.is_loadable else messages.WorkerState(self.value)

    def __str__(self) -> str:
        """The state as shown to people."""
        return "loadable" if self.is_loadable else self.value


class ReplicaEvent(enum.Enum):
    """An event that may change the state of a replica."""

    ENGINE_SERVES = enum.auto()
    ENGINE_DIED = enum.auto()
    LOAD = enum.auto()
    """The model is requested, and there is room for it."""
    UNLOAD = enum.auto()
    UNLOADED = enum.auto()
    """The engine has ended as asked, or its model can't be loaded."""
    DRAIN = enum.auto()
    LEAVE = enum.auto()
    STOP = enum.auto()


_S, _E = ReplicaState, ReplicaEvent
_ENDS = {_E.DRAIN: _S.DRAINING, _E.STOP: _S.STOPPED}
_NEXT: dict[ReplicaState, dict[ReplicaEvent, ReplicaState]] = {
    _S.STARTING: {_E.ENGINE_SERVES: _S.READY, _E.UNLOADED: _S.UNLOADED, **_ENDS},
    _S.READY: {_E.ENGINE_DIED: _S.RESTARTING, _E.UNLOAD: _S.UNLOADING, **_ENDS},
    _S.RESTARTING: {_E.ENGINE_SERVES: _S.READY, _E.UNLOAD: _S.UNLOADING, _E.UNLOADED: _S.UNLOADED, **_ENDS},
    _S.UNLOADING: {_E.UNLOADED: _S.UNLOADED, **_ENDS},
    _S.UNLOADED: {_E.LOAD: _S.STARTING, **_ENDS},
    _S.DRAINING: {_E.LEAVE: _S.LEAVING, _E.STOP: _S.STOPPED},
    _S.LEAVING: {_E.STOP: _S.STOPPED},
    _S.STOPPED: {},
}


def after(state: ReplicaState, event: ReplicaEvent) -> ReplicaState:
    """Returns the state after an event."""
    return _NEXT[state].get(event, state)


class Serving(NamedTuple):
    """An engine that serves, and its description."""

    engine: contract.Engine
    config: contract.EngineConfig
