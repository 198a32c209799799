"""Gives each request its placement: at once, or, while every worker is busy or restarts, when it is its turn."""

import asyncio
import random
import time
from collections.abc import Collection
from typing import NamedTuple

from tokenbus.protocol.wire import errors, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.placement.placement import Capacity, NoWorker, Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import Policy
from tokenbus.router.requests.fair_queue import FairQueue, QueuedRequest
from tokenbus.router.requests.flight import Flight

_NO_WISH = messages.RoutingOptions()
_GUESSED_TOKENS = 256
"""What a request without `max_tokens` is taken to generate."""


class PolicySettings(NamedTuple):
    """How workers are chosen."""

    policies: dict[str, Policy]
    default_policy: str
    rng: random.Random
    temperature: float = 0.0


class QueueSettings(NamedTuple):
    """How many may wait for a model in one router."""

    max_requests: int = 1_024
    max_tokens: int = 1 << 22
    priority_s: float = 1.0
    """Seconds of waiting that one step of priority is worth."""


class _Held(NamedTuple):
    flight: Flight
    outcome: "asyncio.Future[Placement | NoWorker | errors.Error | None]"


class PlacementQueue:
    """The requests of one router that wait for their placement. Choosing and booking are one step without a pause."""

    def __init__(self, fleet: Fleet, choice: PolicySettings, settings: QueueSettings, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._choice = choice
        self._settings = settings
        self._metrics = metrics
        self._hashing, self._placing = (self._metrics.phases.labels(phase) for phase in ("hash", "place"))
        self._queues: dict[str, FairQueue] = {}
        self._held: dict[str, _Held] = {}

    def __repr__(self) -> str:
        return f"<Turns by {self._choice.default_policy}, {len(self._held)} waiting>"

    def __len__(self) -> int:
        return len(self._held)

    def adopt(self, default_policy: str, temperature: float, settings: QueueSettings) -> None:
        """Another way to choose, and other bounds, from now on."""
        self._choice = self._choice._replace(default_policy=default_policy, temperature=temperature)
        self._settings = settings
        for backlog in self._queues.values():
            backlog.set(settings.max_requests, settings.max_tokens)

    def check(self, wish: messages.RoutingOptions | None) -> None:
        """Raises RequestError for a policy that there is not."""
        if wish is not None and wish.policy and wish.policy not in self._choice.policies:
            known = ", ".join(self._choice.policies)
            raise errors.request_error(
                errors.Code.INVALID_REQUEST, f"routing.policy: must be one of {known}", param="routing.policy"
            )

    @property
    def most_waiting(self) -> int:
        """How many requests of one model may wait."""
        return self._settings.max_requests

    async def place(self, flight: Flight, without: Collection[str]) -> Placement | NoWorker | None:
        """Where a request goes, booked; None if it was cancelled while it waited. `without` have refused it.

        Raises RequestError when too many wait, or for too long."""
        now = time.monotonic()
        owner = self._fleet.owner_of(flight.key, flight.model) if flight.attempt == 0 else None
        if owner is not None:  # the same id, placed by another router: the worker that holds it decides
            self._fleet.book(owner.card.address, self._prompt(flight), now)
            return Placement(owner, self._choice.default_policy)
        is_pinned = flight.request.routing is not None and bool(flight.request.routing.worker_id)
        must_wait = flight.model in self._queues or self._fleet.capacity(flight.model, now) is Capacity.BUSY
        if is_pinned or without or not must_wait:
            return self._choose(flight, without, now)
        return await self._wait(flight, now)

    def work_off(self, now: float) -> None:
        """Places those whose turn it is, as far as there is room. To be called whenever there may be some."""
        for model, backlog in list(self._queues.items()):
            while backlog and self._fleet.capacity(model, now) is Capacity.AVAILABLE:
                self._place_held(self._held.pop(backlog.pop(now).key), now)
            if backlog and not self._fleet.workers_of(model):
                for held in [held for held in self._held.values() if held.flight.model == model]:
                    self._release(held.flight, NoWorker())
            self._drop_if_empty(model)

    def _place_held(self, held: _Held, now: float) -> None:
        try:
            held.outcome.set_result(self._choose(held.flight, (), now))
        except Exception as error:  # a bug of ours: it ends this one request, and is logged there
            held.outcome.set_exception(error)

    def depths(self) -> dict[str, int]:
        """How many wait, by model."""
        return {model: len(backlog) for model, backlog in self._queues.items()}

    def cancel(self, flight: Flight) -> None:
        """Has a request that waits wait no more."""
        if flight.key in self._held:
            self._release(flight, None)

    def check_integrity(self) -> None:
        waiting = {key for key in self._held for backlog in self._queues.values() if key in backlog}
        assert waiting == self._held.keys()
        assert sum(len(backlog) for backlog in self._queues.values()) == len(self._held)
        for backlog in self._queues.values():
            assert len(backlog)
            backlog.check_integrity()

    async def _wait(self, flight: Flight, now: float) -> Placement | NoWorker | None:
        held = _Held(flight, asyncio.get_running_loop().create_future())
        self._held[flight.key] = held
        settings = self._settings
        if flight.model not in self._queues:
            self._queues[flight.model] = FairQueue(
                settings.max_requests, settings.max_tokens, priority_s=settings.priority_s
            )
        backlog = self._queues[flight.model]
        for refused in backlog.put(_waiting(flight)):
            self._refuse(refused.key, backlog.retry_after_ms(now))
        self.work_off(now)
        remaining_ms = flight.remaining_ms(now)
        try:
            await asyncio.wait([held.outcome], timeout=None if remaining_ms is None else remaining_ms / 1e3)
        finally:
            if not held.outcome.done():
                self._release(flight, errors.make_error(errors.Code.DEADLINE_EXCEEDED))
        self._metrics.queue_wait.labels(flight.model).observe(time.monotonic() - now)
        outcome = held.outcome.result()
        if isinstance(outcome, errors.Error):
            raise errors.RequestError(outcome)
        return outcome

    def _refuse(self, key: str, retry_after_ms: float) -> None:
        """A request was given up by the backlog."""
        error = errors.make_error(errors.Code.OVERLOADED, retry_after_ms=round(retry_after_ms, 1))
        self._held.pop(key).outcome.set_result(error)

    def _release(self, flight: Flight, outcome: NoWorker | errors.Error | None) -> None:
        self._queues[flight.model].remove(flight.key)
        self._drop_if_empty(flight.model)
        self._held.pop(flight.key).outcome.set_result(outcome)

    def _drop_if_empty(self, model: str) -> None:
        """A model for which nobody waits has no backlog."""
        if model in self._queues and not self._queues[model]:
            del self._queues[model]

    def _choose(self, flight: Flight, without: Collection[str], now: float) -> Placement | NoWorker:
        began = time.perf_counter()
        asked = flight.request.routing or _NO_WISH
        policy = self._choice.policies[asked.policy or self._choice.default_policy]
        wish = PlacementOptions(asked.worker_id or None, without, self._choice.temperature, bool(asked.explain))
        prompt = self._prompt(flight)
        hashed = time.perf_counter()
        placement = self._fleet.place(flight.model, prompt, policy, self._choice.rng, now, wish)
        ended = time.perf_counter()
        self._fleet.stats.record_decision_time(ended - began)
        self._hashing.observe(hashed - began)
        self._placing.observe(ended - hashed)
        if isinstance(placement, Placement):
            self._count(flight, placement)
        return placement

    def _count(self, flight: Flight, placement: Placement) -> None:
        self._metrics.placements.labels(flight.model, placement.policy).inc()
        self._metrics.prompt_tokens.labels(flight.model).inc(flight.num_prompt_tokens)
        size = placement.worker.card.kv_block_size or 0
        self._metrics.overlap_tokens.labels(flight.model).inc(placement.overlap_blocks * size)

    def _prompt(self, flight: Flight) -> PlacementRequest:
        assert flight.prompt_ids is not None, flight
        scheme, request = self._fleet.hash_scheme_of(flight.model), flight.request
        session = f"{flight.tenant} {request.session_id}" if request.session_id else ""
        if scheme is None or request.cache_prompt is False:
            return PlacementRequest(flight.key, flight.num_prompt_tokens, session=session)
        hashes = scheme.hashes(flight.prompt_ids, flight.tenant, request.cache_salt or "")
        return PlacementRequest(flight.key, flight.num_prompt_tokens, hashes, session)


def _waiting(flight: Flight) -> QueuedRequest:
    request = flight.request
    tokens = flight.num_prompt_tokens + min(request.max_tokens or _GUESSED_TOKENS, _MOST_TOKENS)
    return QueuedRequest(flight.key, flight.tenant, flight.received_at, tokens, priority=request.priority or 0)


_MOST_TOKENS = 1 << 16
"""A request may ask for more than any context has."""
