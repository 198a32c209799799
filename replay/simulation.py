"""Replays a trace on a fleet in virtual time: routers place requests, workers take steps, events travel.

Time jumps from one arrival to the next. In between the workers take all steps that end by then, and their events reach
the routers `delay_s` later. Only while requests wait in a router does time advance step by step, since the end of each
step may make room for one. The trace, the settings and the seed alone determine what happens."""

import itertools
import random
from collections import deque
from typing import NamedTuple

from tokenbus.protocol.wire import internal, messages
from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.traces import TracedRequest
from tokenbus.replay.virtual_worker import MODEL, DecodeSteps, RequestProgress, VirtualWorker
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import Capacity, Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import Policy
from tokenbus.router.requests.queueing.fair_queue import FairQueue, QueuedRequest
from tokenbus.worker.engine.sim.runner import VOCAB_SIZE

_NEVER = float("inf")
_MAX_QUEUED_REQUESTS, _MAX_QUEUED_TOKENS = 1 << 20, 1 << 32


class RequestOutcome(NamedTuple):
    """When and where a request was served. Times are in seconds of the replay."""

    request: TracedRequest
    worker: int
    arrived_at: float
    placed_at: float
    first_at: float
    ended_at: float
    cached_tokens: int
    predicted_tokens: int
    """Prompt tokens predicted by the router to be cached."""


class _Placed(NamedTuple):
    worker: int
    placed_at: float
    predicted_tokens: int


class _Router:
    """The core of one router, its queue, and the events in transit to it."""

    def __init__(self, workers: list[VirtualWorker], policy: Policy, rng: random.Random, temperature: float) -> None:
        self._policy, self._rng = policy, rng
        self._options = PlacementOptions(temperature=temperature)
        self.fleet = Fleet(0.0)
        for worker in workers:
            self.fleet.apply_card(worker.card(), 0.0)
        self.pending_events: deque[tuple[float, internal.Events]] = deque()
        self.queue = FairQueue(_MAX_QUEUED_REQUESTS, _MAX_QUEUED_TOKENS)
        self.waiting: dict[str, tuple[int, PlacementRequest]] = {}
        """The numbers of queued requests in the trace."""

    def receive_events(self, now: float) -> None:
        while self.pending_events and self.pending_events[0][0] <= now:
            at, entry = self.pending_events.popleft()
            self.fleet.apply_events(MODEL, entry, at)
        self.fleet.renew_all_leases(now)
        self.fleet.sweep(now)

    def submit(self, number: int, request: TracedRequest, now: float) -> None:
        """Queues a request."""
        scheme = self.fleet.model(MODEL).hash_scheme
        assert scheme is not None
        hashes = scheme.hashes(request.token_ids(VOCAB_SIZE).tobytes(), request.tenant)
        key, answer_tokens = request.key(number), self.fleet.model(MODEL).expected_answer_tokens(request.output_tokens)
        tokens = request.prompt_tokens + answer_tokens
        refused = self.queue.enqueue(QueuedRequest(key, request.tenant, now, tokens, priority=request.priority))
        assert not refused, "the trace is longer than the queue"
        placed = PlacementRequest(key, request.prompt_tokens, hashes, answer_tokens=answer_tokens)
        self.waiting[key] = number, placed

    def place_next(self, now: float) -> tuple[int, Placement] | None:
        """Places the next queued request, if there is one and some worker can take it."""
        if not self.waiting or self.fleet.model(MODEL).capacity(now) is not Capacity.AVAILABLE:
            return None
        number, request = self.waiting.pop(self.queue.pop(now).key)
        placement = self.fleet.place(MODEL, request, self._policy, self._rng, now, self._options)
        assert isinstance(placement, Placement), request
        return number, placement


class Simulation:
    """Replays one trace once."""

    def __init__(self, settings: ReplaySettings, policy: Policy) -> None:
        self._settings = settings
        self._delay_s = settings.delay_ms / 1e3
        speeds = itertools.islice(itertools.cycle(settings.speeds), settings.workers)
        self._workers = [
            VirtualWorker(f"w{number:04}", settings, speed, _role_of(number, settings.prefill_workers))
            for number, speed in enumerate(speeds)
        ]
        """Those that compute prompts for others come first, since the others need to know when their prompts are
        computed."""
        self._numbers = {worker.worker_id: number for number, worker in enumerate(self._workers)}
        rngs = [random.Random(f"{settings.seed} {number}") for number in range(settings.routers)]
        self._routers = [_Router(self._workers, policy, rng, settings.temperature) for rng in rngs]
        self._placed: dict[int, _Placed] = {}
        self._first_tokens: dict[int, RequestProgress] = {}
        self._requests: list[TracedRequest] = []
        self.outcomes: list[RequestOutcome] = []

    def __repr__(self) -> str:
        return f"<Simulation of {len(self._workers)} workers, {len(self.outcomes)} requests done>"

    def play(self, trace: list[TracedRequest]) -> list[DecodeSteps]:
        """Serves all requests of a trace to completion; returns the steps in which sequences got further tokens."""
        self._requests = trace
        for number, request in enumerate(trace):
            now = request.at_s / self._settings.speedup
            self._drain_queues(now)
            self._advance(now)
            router = self._routers[number % len(self._routers)]
            router.submit(number, request, now)
            self._place_all(router, now)
        self._drain_queues(_NEVER)
        self._advance(_NEVER)
        return [steps for worker in self._workers for steps in worker.steps]

    @property
    def num_fetched_tokens(self) -> int:
        return sum(worker.num_fetched_tokens for worker in self._workers)

    @property
    def num_remote_prefill_tokens(self) -> int:
        return sum(worker.num_remote_prefill_tokens for worker in self._workers)

    def check_integrity(self) -> None:
        for worker in self._workers:
            worker.check_integrity()
        for router in self._routers:
            router.fleet.check_integrity()

    def _drain_queues(self, until: float) -> None:
        """Advances step by step to `until`, as long as requests wait in a router."""
        while any(router.waiting for router in self._routers):
            ends = [at for worker in self._workers if (at := worker.next_at) is not None]
            arrivals = [router.pending_events[0][0] for router in self._routers if router.pending_events]
            now = min(min(ends, default=_NEVER) + self._delay_s, min(arrivals, default=_NEVER))
            if now >= until:
                return
            self._advance(now)
            for router in self._routers:
                self._place_all(router, now)

    def _advance(self, now: float) -> None:
        """Lets the workers take all steps that end by `now`, and delivers the events that arrive by then to the
        routers."""
        for worker in self._workers:
            # routers receive all events up to then together, so these steps may be coalesced
            worker.advance(now, coalesce_until=now - self._delay_s)
        events = [entry for worker in self._workers for entry in worker.events]
        events.sort(key=lambda entry: entry[0])
        for worker in self._workers:
            for progress in worker.progress:
                self._record(progress)
            worker.progress.clear()
            worker.events.clear()
        for router in self._routers:
            router.pending_events.extend((at + self._delay_s, entry) for at, entry in events)
            router.receive_events(now)

    def _place_all(self, router: _Router, now: float) -> None:
        while (placed := router.place_next(now)) is not None:
            number, placement = placed
            at = self._numbers[placement.worker.card.worker_id]
            predicted_tokens = placement.overlap_tokens + placement.fetch_tokens
            self._placed[number] = _Placed(at, now, predicted_tokens)
            holder = placement.fetch_from
            source = None if holder is None else self._workers[self._numbers[holder.card.worker_id]]
            worker, request = self._workers[at], self._requests[number]
            if placement.has_remote_prefill and source is not None:
                worker.submit_with_remote_prefill(number, request, now, source)
            else:
                worker.submit(number, request, now, source, placement.expected_cached_tokens)

    def _record(self, progress: RequestProgress) -> None:
        number = progress.number
        if progress.cached_tokens is not None:
            self._first_tokens[number] = progress
        if progress.finish_reason is None:
            return
        first, placed = self._first_tokens.pop(number), self._placed.pop(number)
        assert first.cached_tokens is not None
        self.outcomes.append(
            RequestOutcome(
                self._requests[number],
                placed.worker,
                self._requests[number].at_s / self._settings.speedup,
                placed.placed_at,
                first.at_s,
                progress.at_s,
                first.cached_tokens,
                placed.predicted_tokens,
            )
        )


def _role_of(number: int, num_prefill: int) -> messages.WorkerRole:
    if number < num_prefill:
        return messages.WorkerRole.PREFILL
    return messages.WorkerRole.DECODE if num_prefill else messages.WorkerRole.BOTH
