"""Decides which models a worker loads and unloads, so that their memory stays within a budget (decision 0063).

    UNLOADED --Load--> LOADING --loaded--> LOADED --Unload--> UNLOADING --unloaded--> UNLOADED
        ^                 |                   |
        +-----failed------+------failed-------+

A model is wanted while it is requested repeatedly. Wanted models are loaded in the order in which they were requested,
one at a time. Idle models, the least recently used first, make room for the first in that order. A model with running
requests is never unloaded. But if the first one waits for long, a busy model accepts no new requests, and is unloaded
as soon as the running ones have ended: otherwise busy models could keep out all others."""

import enum
from collections.abc import Iterable
from typing import Literal, NamedTuple

from tokenbus.protocol.wire import errors
from tokenbus.worker.engine.memory.fit import MemoryNeed, mib

_WANT_TTL_S = 3.0
"""A model that has not been requested for this long is no longer wanted; routers ask twice a second."""
_FAILURE_TTL_S = 10.0
"""A model that could not be loaded is not retried for this long."""
_PATIENCE_S = 5.0
"""The first model in the order waits this long before a busy one is drained."""
_LINGER_S = 0.2
"""A model that has been idle for less than this is not unloaded: its clients may be about to send more requests."""
_FIRST_USE_S = 2.0
"""The same for a model that was loaded and not yet used: the requests that it was loaded for are on their way."""


class LoadStep(NamedTuple):
    """The action to load a model, whose state is already LOADING."""

    name: str


class Unload(NamedTuple):
    """The action to drain and unload a model, whose state is already UNLOADING."""

    name: str
    reason: Literal["idle", "room", "operator"]
    """Whether it was idle for long, another model needs its memory, or an operator wants that."""


class LoadState(enum.StrEnum):
    """The states of a model."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class _Model:
    """One model: its state, demand and use."""

    def __init__(self) -> None:
        self.state = LoadState.UNLOADED
        self.need: MemoryNeed | None = None
        self.wanted_since: float | None = None
        self.wanted_at = 0.0
        """When it was last requested."""
        self.idle_since: float | None = None
        """When its last request ended; None while there are any."""
        self.was_used = False
        """Whether it has had a request since it was loaded."""
        self.failure: errors.Error | None = None
        self.failed_at = 0.0
        self.is_released = False
        """Whether an operator wants it unloaded."""

    def idle_s(self, now: float) -> float:
        """Returns how long it has been unused."""
        return now - self.idle_since if self.state is LoadState.LOADED and self.idle_since is not None else 0.0

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, or will take."""
        assert self.need is not None
        return self.need.total_bytes

    def is_idle(self, now: float) -> bool:
        """Whether it may be unloaded now."""
        return self.state is LoadState.LOADED and self.idle_s(now) >= (_LINGER_S if self.was_used else _FIRST_USE_S)


class LoadPlan:
    """The on-demand models of one worker."""

    def __init__(self, names: Iterable[str], budget_bytes: int, idle_unload_s: float = 0.0) -> None:
        """A budget of 0 makes free memory the only limit, and an `idle_unload_s` of 0 unloads only to make room."""
        self._models = {name: _Model() for name in names}
        self.budget_bytes = budget_bytes
        self._idle_unload_s = idle_unload_s

    def __repr__(self) -> str:
        return f"<LoadPlan {', '.join(f'{name} {one.state}' for name, one in self._models.items())}>"

    def state_of(self, name: str) -> LoadState:
        return self._models[name].state

    def need_of(self, name: str) -> MemoryNeed | None:
        """Returns the memory that a model takes, once known."""
        return self._models[name].need

    @property
    def reserved_bytes(self) -> int:
        """The memory of all models that are not unloaded."""
        return sum(one.num_bytes for one in self._models.values() if one.state is not LoadState.UNLOADED)

    @property
    def has_wanted(self) -> bool:
        """Whether a model has been requested and not loaded since. Otherwise `next_action` needs no free memory."""
        return any(one.wanted_since is not None for one in self._models.values())

    def take(self, num_bytes: int) -> bool:
        """Takes memory out of the budget for a model loaded alongside these; returns whether there was enough."""
        # a budget of 0 would mean no limit
        if 0 < self.budget_bytes <= self.reserved_bytes + num_bytes:
            return False
        if self.budget_bytes:
            self.budget_bytes -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Gives back what `take` has taken."""
        if self.budget_bytes:
            self.budget_bytes += num_bytes

    def set_need(self, name: str, need: MemoryNeed) -> None:
        """Notes the memory that a model takes. It is not loaded before this is known."""
        model = self._models[name]
        if model.state is LoadState.UNLOADED:  # a loaded model keeps the need that it was loaded with
            model.need = need

    def want(self, name: str, now: float) -> errors.Error | None:
        """Notes a request for a model; returns the error if it cannot be loaded."""
        model = self._models[name]
        if model.state in (LoadState.LOADING, LoadState.LOADED):
            return None
        if model.failure is not None and now - model.failed_at < _FAILURE_TTL_S:
            return model.failure
        model.failure = None
        if model.need is not None and 0 < self.budget_bytes < model.need.total_bytes:
            return _refusal(name, model.need, f"the budget for all models is {mib(self.budget_bytes)}")
        if model.wanted_since is None or now - model.wanted_at > _WANT_TTL_S:
            model.wanted_since = now
        model.wanted_at = now
        return None

    def loaded(self, name: str, now: float) -> None:
        """Notes that a model that was LOADING is serving."""
        model = self._models[name]
        assert model.state is LoadState.LOADING, self
        model.state, model.idle_since, model.was_used = LoadState.LOADED, now, False

    def failed(self, name: str, reason: str, now: float, code: errors.Code = errors.Code.NO_WORKER) -> None:
        """Notes that a model could not be loaded, or was lost and can't be reloaded. It now takes no memory."""
        model = self._models[name]
        model.state, model.wanted_since, model.is_released = LoadState.UNLOADED, None, False
        text = f"the model {name} can't be loaded: {reason}"
        model.failure = errors.make_error(code, text, retry_after_ms=_FAILURE_TTL_S * 1e3)
        model.failed_at = now

    def unloaded(self, name: str) -> None:
        """Notes that a model that was UNLOADING no longer takes any memory."""
        model = self._models[name]
        assert model.state is LoadState.UNLOADING, self
        model.state = LoadState.UNLOADED

    def release(self, name: str) -> None:
        """Notes that an operator wants a model unloaded that is LOADED. The next request for it loads it again."""
        self._models[name].is_released = self._models[name].state is LoadState.LOADED

    def remove(self, name: str) -> None:
        """Forgets a model that is no longer served."""
        del self._models[name]

    def used(self, name: str, *, idle_since: float | None) -> None:
        """Notes since when a LOADED model has had no request; None while it has one."""
        model = self._models[name]
        if model.state is not LoadState.LOADED:
            return
        if idle_since is None or model.idle_since is None or idle_since > model.idle_since:
            model.was_used, model.idle_since = True, idle_since

    def next_action(self, now: float, free_bytes: int) -> LoadStep | Unload | None:
        """Returns the next action, and assumes that it is carried out. The machine has `free_bytes` of free memory.

        Call it again after each action, after each change, and several times a second."""
        if released := next((name for name, one in self._models.items() if one.is_released), ""):
            return self._unload(released, "operator")
        if overdue := self._overdue(now):
            return self._unload(overdue, "idle")
        name = self._first_wanted(now)
        if name is None or any(one.state is LoadState.LOADING for one in self._models.values()):
            return None
        model = self._models[name]
        assert model.need is not None
        if self._missing_bytes(model.need, free_bytes) <= 0:
            model.state, model.wanted_since, model.failure = LoadState.LOADING, None, None
            return LoadStep(name)
        return self._make_room(name, now, free_bytes)

    def check_integrity(self) -> None:
        states = [one.state for one in self._models.values()]
        assert states.count(LoadState.LOADING) <= 1, self
        assert not self.budget_bytes or self.reserved_bytes <= self.budget_bytes, self
        for model in self._models.values():
            assert model.state is LoadState.UNLOADED or model.need is not None, self
            assert (
                model.state is LoadState.UNLOADED or model.wanted_since is None or model.state is LoadState.UNLOADING
            ), self

    def _overdue(self, now: float) -> str:
        """Returns a model that has been unused for too long, if any."""
        if not self._idle_unload_s:
            return ""
        limit_s = max(self._idle_unload_s, _LINGER_S)
        return next((name for name, one in self._models.items() if one.idle_s(now) >= limit_s), "")

    def _first_wanted(self, now: float) -> str | None:
        """Returns the model that has been wanted for the longest time, and forgets those that are no longer wanted."""
        waiting: list[tuple[float, str]] = []
        for name, model in self._models.items():
            if model.wanted_since is not None and now - model.wanted_at > _WANT_TTL_S:
                model.wanted_since = None
            if model.wanted_since is not None and model.state is LoadState.UNLOADED and model.need is not None:
                waiting.append((model.wanted_since, name))
        return min(waiting)[1] if waiting else None

    def _missing_bytes(self, need: MemoryNeed, free_bytes: int) -> int:
        """Returns how much memory must be freed before a model may be loaded."""
        over = self.reserved_bytes + need.total_bytes - self.budget_bytes if self.budget_bytes else 0
        return max(over, need.total_bytes - free_bytes)

    def _make_room(self, name: str, now: float, free_bytes: int) -> Unload | None:
        """Unloads another model, one at a time."""
        model = self._models[name]
        assert model.need is not None
        assert model.wanted_since is not None
        loaded = [one for one in self._models if self._models[one].state is LoadState.LOADED]
        if any(one.state is LoadState.UNLOADING for one in self._models.values()):
            return None
        if not loaded:  # the machine lacks memory, or some was taken out of the budget meanwhile
            free_bytes = min(free_bytes, self.budget_bytes or free_bytes)
            shortage = f"it needs {model.need}, and {mib(free_bytes)} of memory are free"
            self.failed(name, shortage, now, errors.Code.INSUFFICIENT_MEMORY)
            return None
        idle = [one for one in loaded if self._models[one].is_idle(now)]
        missing = self._missing_bytes(model.need, free_bytes)
        is_enough = sum(self._models[one].num_bytes for one in idle) >= missing
        if not idle or not is_enough:
            # unloading idle models would be in vain, unless a busy one follows
            if now - model.wanted_since < _PATIENCE_S:
                return None
            idle = idle or loaded
        victim = min(idle, key=lambda one: self._models[one].idle_since or now)
        return self._unload(victim, "room")

    def _unload(self, name: str, reason: Literal["idle", "room", "operator"]) -> Unload:
        self._models[name].state, self._models[name].is_released = LoadState.UNLOADING, False
        return Unload(name, reason)


def _refusal(name: str, need: MemoryNeed, limit: str) -> errors.Error:
    text = f"the model {name} can't be loaded: it needs {need}, and {limit}"
    return errors.make_error(errors.Code.INSUFFICIENT_MEMORY, text)
