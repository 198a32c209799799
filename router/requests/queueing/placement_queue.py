"""Places requests on workers: at once, or in turn once a worker has capacity if all are busy or restarting.

A request waits in the fair queue of its model. The result of the wait is a future that is resolved exactly once: by a
placement, by NoWorker when the model's last worker has left, by None when the request is cancelled, or by an error.

Decision 0028 says why requests wait here and not in workers.
"""

import asyncio
import random
import time
from collections.abc import Collection, Hashable
from typing import NamedTuple

from tokenbus.protocol.wire import block_hash, errors, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement import adapters
from tokenbus.router.placement.placement import Capacity, NoWorker, Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import Policy
from tokenbus.router.placement.remote_prefills import MIN_REMOTE_PREFILL_TOKENS
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.requests.queueing.fair_queue import FairQueue, QueuedRequest
from tokenbus.router.telemetry.metrics import RouterMetrics

_NO_ROUTING = messages.RoutingOptions()


class PolicySettings(NamedTuple):
    """The policies that requests may name, and the one for requests that name none."""

    policies: dict[str, Policy]
    default_policy: str
    rng: random.Random
    temperature: float = 0.0
    min_remote_prefill_tokens: int = MIN_REMOTE_PREFILL_TOKENS
    """Fewest missing tokens for which another worker may compute a prompt; 0: none ever does."""


class QueueSettings(NamedTuple):
    """Limits of the queue of each model in one router."""

    max_requests: int = 1_024
    max_tokens: int = 1 << 22


class _Waiter(NamedTuple):
    flight: Flight
    outcome: "asyncio.Future[Placement | NoWorker | errors.Error | None]"


class PlacementQueue:
    """Chooses a worker and books the request there in one step, so that two requests never take the same capacity."""

    def __init__(self, fleet: Fleet, policy: PolicySettings, settings: QueueSettings, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._policy = policy
        self._settings = settings
        self._metrics = metrics
        self._hashing, self._placing = (self._metrics.phases.labels(phase) for phase in ("hash", "place"))
        self._queues: dict[str, FairQueue] = {}
        """The queue of each model that has waiting requests."""
        self._waiters: dict[str, _Waiter] = {}

    def __repr__(self) -> str:
        return f"<PlacementQueue by {self._policy.default_policy}, {len(self._waiters)} waiting>"

    def __len__(self) -> int:
        return len(self._waiters)

    def update_settings(self, default_policy: str, temperature: float, settings: QueueSettings) -> None:
        """Changes the policy and the limits for everything that is placed or queued from now on."""
        self._policy = self._policy._replace(default_policy=default_policy, temperature=temperature)
        self._settings = settings
        for queue in self._queues.values():
            queue.set_limits(settings.max_requests, settings.max_tokens)

    def check_policy(self, routing: messages.RoutingOptions | None) -> None:
        """Raises RequestError if a request names an unknown policy."""
        if routing is not None and routing.policy and routing.policy not in self._policy.policies:
            known = ", ".join(self._policy.policies)
            raise errors.request_error(
                errors.Code.INVALID_REQUEST, f"routing.policy: must be one of {known}", param="routing.policy"
            )

    @property
    def max_requests(self) -> int:
        """Requests of one model that may wait."""
        return self._settings.max_requests

    def depths(self) -> dict[str, int]:
        """Number of waiting requests by model."""
        return {model: len(queue) for model, queue in self._queues.items()}

    async def place(self, flight: Flight, excluded: Collection[str]) -> Placement | NoWorker | None:
        """Books a request on a worker that is not `excluded`; returns None if it is cancelled while it waits.

        Raises RequestError if too many requests are waiting, or if the deadline passes first."""
        now = time.monotonic()
        placement = self.place_at_once(flight, excluded, now)
        if placement is not None:
            return placement
        try:
            return await self._wait(flight, now)
        finally:
            flight.way.queue_s += time.monotonic() - now

    def place_at_once(self, flight: Flight, excluded: Collection[str], now: float) -> Placement | NoWorker | None:
        """Books a request on a worker that is not `excluded`; returns None if it has to wait for its turn."""
        self._bind_adapters(flight)
        owner = self._fleet.owner_of(flight.key, flight.model) if flight.attempt == 0 else None
        if owner is not None:
            # Another router has placed a request with this id there: only that worker can tell whether it is the same.
            self._fleet.book(owner.card.address, self._prompt(flight), now)
            return Placement(owner, self._policy.default_policy)
        is_pinned = flight.request.routing is not None and bool(flight.request.routing.worker_id)
        must_wait = self._capacity(flight, now) is Capacity.BUSY
        if not flight.has_begun:  # one that has begun waits for capacity, but not for other requests
            must_wait = must_wait or flight.model in self._queues
        if is_pinned or excluded or not must_wait:
            return self._place_now(flight, excluded, now)
        return None

    def place_waiting(self, now: float) -> None:
        """Places waiting requests while there is capacity. Call it whenever a worker may have become free."""
        for model, queue in list(self._queues.items()):
            while (queued := self._next_startable(model, queue, now)) is not None:
                waiter = self._waiters.pop(queued.key)
                try:
                    waiter.outcome.set_result(self._place_now(waiter.flight, (), now))
                except Exception as error:  # a bug, possibly in a plug-in policy: it must only end this request
                    waiter.outcome.set_exception(error)
            if queue and not self._fleet.workers_of(model):
                self.end_all(model, NoWorker())
            self._drop_if_empty(model)

    def cancel(self, flight: Flight) -> None:
        """Ends the wait of a request, if it is waiting."""
        if flight.key in self._waiters:
            self._resolve(flight.key, None)

    def end_all(self, model: str, outcome: NoWorker | errors.Error) -> None:
        """Ends the wait of all requests for a model."""
        for key in [key for key, waiter in self._waiters.items() if waiter.flight.model == model]:
            self._resolve(key, outcome)

    def check_integrity(self) -> None:
        waiting = {key for key in self._waiters for queue in self._queues.values() if key in queue}
        assert waiting == self._waiters.keys()
        assert sum(len(queue) for queue in self._queues.values()) == len(self._waiters)
        for queue in self._queues.values():
            assert len(queue)
            queue.check_integrity()

    async def _wait(self, flight: Flight, now: float) -> Placement | NoWorker | None:
        waiter = self._waiters[flight.key] = _Waiter(flight, asyncio.get_running_loop().create_future())
        if flight.model not in self._queues:
            self._queues[flight.model] = FairQueue(*self._settings)
        queue, request = self._queues[flight.model], flight.request
        tokens = flight.num_prompt_tokens + self._fleet.model(flight.model).expected_answer_tokens(request.max_tokens)
        queued = QueuedRequest(
            flight.key, flight.tenant, flight.received_at, tokens, request.priority or 0, flight.needs
        )
        if flight.has_begun:
            queue.enqueue_begun(queued)
        for evicted in () if flight.has_begun else queue.enqueue(queued):
            error = errors.make_error(errors.Code.OVERLOADED, retry_after_ms=round(queue.retry_after_ms(now), 1))
            self._waiters.pop(evicted.key).outcome.set_result(error)
        self.place_waiting(now)
        remaining_ms = flight.remaining_ms(now)
        try:
            await asyncio.wait([waiter.outcome], timeout=None if remaining_ms is None else remaining_ms / 1e3)
        finally:
            if not waiter.outcome.done():
                self._resolve(flight.key, errors.make_error(errors.Code.DEADLINE_EXCEEDED))
        self._metrics.queue_wait.labels(flight.model).observe(time.monotonic() - now)
        outcome = waiter.outcome.result()
        if isinstance(outcome, errors.Error):
            raise errors.RequestError(outcome)
        return outcome

    def _capacity(self, flight: Flight, now: float) -> Capacity:
        """Returns whether a worker that has what a request needs can start it now."""
        options = PlacementOptions(adapters=flight.adapters, tenant=flight.tenant, feature=flight.feature)
        return self._fleet.model(flight.model).capacity(now, options)

    def _next_startable(self, model: str, queue: FairQueue, now: float) -> QueuedRequest | None:
        """Removes from a queue the next request that a worker can start now.

        Requests whose adapters or feature only busy workers have are overtaken by others; those that no worker can
        serve any more are dropped."""
        found: dict[tuple[str, Hashable], bool] = {}
        is_available = self._fleet.model(model).capacity(now) is Capacity.AVAILABLE
        if not is_available and not queue.has_needs:  # asked for each event of a worker, however many tenants wait
            return None

        def can_start(queued: QueuedRequest) -> bool:
            if not queued.needs:
                return is_available
            kind = queued.tenant, queued.needs
            if kind not in found:
                found[kind] = self._capacity(self._waiters[queued.key].flight, now) is not Capacity.BUSY
            return found[kind]

        return queue.pop_startable(now, can_start)

    def _resolve(self, key: str, outcome: NoWorker | errors.Error | None) -> None:
        """Takes a request out of its queue and ends its wait."""
        waiter = self._waiters.pop(key)
        self._queues[waiter.flight.model].remove(key)
        self._drop_if_empty(waiter.flight.model)
        waiter.outcome.set_result(outcome)

    def _drop_if_empty(self, model: str) -> None:
        if model in self._queues and not self._queues[model]:
            del self._queues[model]

    def _place_now(self, flight: Flight, excluded: Collection[str], now: float) -> Placement | NoWorker:
        began = time.perf_counter()
        self._bind_adapters(flight)
        routing = flight.request.routing or _NO_ROUTING
        policy = self._policy.policies[routing.policy or self._policy.default_policy]
        options = PlacementOptions(
            routing.worker_id or None,
            excluded,
            self._policy.temperature,
            bool(routing.explain),
            flight.hash_scheme if flight.has_begun else "",
            flight.adapters,
            flight.tenant,
            flight.feature,
            self._policy.min_remote_prefill_tokens,
        )
        prompt = self._prompt(flight)
        hashed = time.perf_counter()
        placement = self._fleet.place(flight.model, prompt, policy, self._policy.rng, now, options)
        ended = time.perf_counter()
        self._fleet.stats.record_decision_time(ended - began)
        self._hashing.observe(hashed - began)
        self._placing.observe(ended - hashed)
        if isinstance(placement, Placement):
            self._metrics.placements.labels(flight.model, placement.policy).inc()
            self._metrics.prompt_tokens.labels(flight.model).inc(flight.num_prompt_tokens)
            self._metrics.overlap_tokens.labels(flight.model).inc(placement.overlap_tokens)
            self._metrics.fetch_tokens.labels(flight.model).inc(placement.fetch_tokens)
            self._metrics.remote_prefills.labels(flight.model).inc(placement.has_remote_prefill)
            self._metrics.distant_placements.labels(flight.model).inc(self._fleet.is_distant(placement.worker))
        return placement

    def _bind_adapters(self, flight: Flight) -> None:
        """Finds out which adapters a request names, until a worker has accepted it: their files may be replaced while
        it waits. Raises RequestError if there are none."""
        if flight.request.lora and flight.first_accepted_at is None:
            cards = (worker.card for worker in self._fleet.workers_of(flight.model))
            flight.adapters = adapters.resolve(cards, flight.request.lora, flight.tenant)

    def _prompt(self, flight: Flight) -> PlacementRequest:
        assert flight.prompt_ids is not None, flight
        scheme, request = self._fleet.model(flight.model).hash_scheme, flight.request
        session = f"{flight.tenant} {request.session_id}" if request.session_id else ""
        num_tokens = flight.num_prompt_tokens + len(flight.completion)
        answer_tokens = self._fleet.model(flight.model).expected_answer_tokens(request.max_tokens)
        if scheme is None or request.cache_prompt is False:
            return PlacementRequest(flight.key, num_tokens, session=session, answer_tokens=answer_tokens)
        # a worker that continues a completion computes it like a prompt, unless its blocks are cached
        token_ids = flight.prompt_ids + block_hash.pack_token_ids(flight.completion.token_ids)
        if request.prompt_logprobs is not None:  # what is cached after this has to be computed again
            token_ids = token_ids[: block_hash.TOKEN_BYTES * max(0, (request.prompt_logprobs_from or 0) - 1)]
        hashes = scheme.hashes(token_ids, flight.tenant, request.cache_salt or "", flight.adapters)
        return PlacementRequest(flight.key, num_tokens, hashes, session, answer_tokens)
