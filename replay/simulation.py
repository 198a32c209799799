"""A fleet over a trace, in virtual time: arrivals are placed by the router's core, workers step, events travel."""

import random
from collections import deque
from typing import NamedTuple

from tokenbus.protocol.wire import internal
from tokenbus.replay.traces import TracedRequest
from tokenbus.replay.virtual_worker import MODEL, DecodeSteps, RequestProgress, VirtualWorker, VirtualWorkerSettings
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import Capacity, NoWorker, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import Policy
from tokenbus.router.requests.fair_queue import FairQueue, QueuedRequest
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.sim.runner import VOCAB_SIZE

_NEVER = float("inf")


class SimulationSettings(NamedTuple):
    """The fleet and its routers."""

    workers: tuple[VirtualWorkerSettings, ...]
    policy: Policy
    seed: int = 0
    speedup: float = 1.0
    """How many times faster than in the trace requests come."""
    num_routers: int = 1
    delay_s: float = 0.001
    """How old an event is when a router hears it."""
    temperature: float = 0.0
    max_queued: int = 1 << 20
    """Requests that may wait in one router, and a four-thousandfold of tokens."""


class RequestOutcome(NamedTuple):
    """What became of a request; times in seconds of the replay."""

    request: TracedRequest
    worker: int
    arrived_at: float
    placed_at: float
    first_at: float
    ended_at: float
    cached_tokens: int
    predicted_tokens: int
    """What the router expected to be held."""


class _Placed(NamedTuple):
    worker: int
    placed_at: float
    predicted_tokens: int


class _Arrived(NamedTuple):
    """A request on its way to a worker."""

    number: int
    request: TracedRequest
    prompt: PlacementRequest


class _Router:
    """One router's beliefs, and the events on their way to it."""

    def __init__(self, settings: SimulationSettings, number: int, workers: list[VirtualWorker]) -> None:
        self._settings = settings
        self._rng = random.Random(f"{settings.seed} {number}")
        self.fleet = Fleet(0.0)
        for machine in workers:
            self.fleet.apply_card(machine.card(), 0.0)
        self.pending_events: deque[tuple[float, internal.Events]] = deque()
        self.queue = FairQueue(settings.max_queued, settings.max_queued << 12)
        self.waiting: dict[str, _Arrived] = {}

    def receive_events(self, now: float) -> None:
        while self.pending_events and self.pending_events[0][0] <= now:
            at, entry = self.pending_events.popleft()
            self.fleet.apply_events(MODEL, entry, at)
        self.fleet.renew_all_leases(now)
        self.fleet.sweep(now)

    def submit(self, arrived: _Arrived, now: float) -> None:
        """Has a request wait for its turn, which may be at once."""
        request, prompt = arrived.request, arrived.prompt
        waiting = QueuedRequest(
            prompt.key, request.tenant, now, request.prompt_tokens + request.output_tokens, priority=request.priority
        )
        refused = self.queue.put(waiting)
        assert not refused, "the trace is longer than the queue"
        self.waiting[prompt.key] = arrived

    def next(self, now: float) -> _Arrived | None:
        """The request whose turn it is, if there is room for it somewhere."""
        if not self.waiting or self.fleet.capacity(MODEL, now) is not Capacity.AVAILABLE:
            return None
        return self.waiting.pop(self.queue.pop(now).key)

    def place(self, prompt: PlacementRequest, now: float) -> tuple[str, int]:
        options = PlacementOptions(temperature=self._settings.temperature)
        placement = self.fleet.place(MODEL, prompt, self._settings.policy, self._rng, now, options)
        assert not isinstance(placement, NoWorker), prompt
        return placement.worker.card.worker_id, placement.overlap_blocks


class Simulation:
    """Plays one trace once. `steps` and the outcomes are what there is to know of it."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._settings = settings
        self._workers = [VirtualWorker(f"w{number:04}", one) for number, one in enumerate(settings.workers)]
        self._by_name = {machine.worker_id: number for number, machine in enumerate(self._workers)}
        self._routers = [_Router(settings, number, self._workers) for number in range(settings.num_routers)]
        self._placed: dict[int, _Placed] = {}
        self._first: dict[int, RequestProgress] = {}
        self._requests: list[TracedRequest] = []
        self.outcomes: list[RequestOutcome] = []

    def __repr__(self) -> str:
        return f"<Simulation of {len(self._workers)} workers, {len(self.outcomes)} requests done>"

    def play(self, trace: list[TracedRequest]) -> list[DecodeSteps]:
        """All requests of a trace to their end; returns the steps in which more than first tokens came."""
        self._requests = trace
        for number, request in enumerate(trace):
            now = request.at_s / self._settings.speedup
            self._drain_queues(now)
            self._advance(now)
            self._arrive(number, request, now)
        self._drain_queues(_NEVER)
        self._advance(_NEVER)
        return [steps for machine in self._workers for steps in machine.steps]

    def check_integrity(self) -> None:
        for machine in self._workers:
            machine.check_integrity()
        for router in self._routers:
            router.fleet.check_integrity()

    def _drain_queues(self, until: float) -> None:
        """While requests wait every step may make room for one: goes from step to step."""
        delay_s = self._settings.delay_s
        while any(router.waiting for router in self._routers):
            ends = [machine.step_ends_at for machine in self._workers if machine.step_ends_at is not None]
            heard = [router.pending_events[0][0] for router in self._routers if router.pending_events]
            now = min(min(ends, default=_NEVER) + delay_s, min(heard, default=_NEVER))
            if now >= until:
                return
            self._advance(now)
            for router in self._routers:
                self._place_all(router, now)

    def _advance(self, now: float) -> None:
        for machine in self._workers:
            machine.advance(now, now - self._settings.delay_s)
        said = [entry for machine in self._workers for entry in machine.events]
        said.sort(key=lambda entry: entry[0])
        for machine in self._workers:
            for progress in machine.progress:
                self._progress(progress)
            machine.progress.clear()
            machine.events.clear()
        for router in self._routers:
            router.pending_events.extend((at + self._settings.delay_s, entry) for at, entry in said)
            router.receive_events(now)

    def _arrive(self, number: int, request: TracedRequest, now: float) -> None:
        router = self._routers[number % len(self._routers)]
        scheme = router.fleet.hash_scheme_of(MODEL)
        assert scheme is not None
        hashes = scheme.hashes(request.token_ids(VOCAB_SIZE).tobytes(), request.tenant)
        key = f"{request.tenant}:{number}"
        router.submit(_Arrived(number, request, PlacementRequest(key, request.prompt_tokens, hashes)), now)
        self._place_all(router, now)

    def _place_all(self, router: _Router, now: float) -> None:
        while (arrived := router.next(now)) is not None:
            self._place(router, arrived, now)

    def _place(self, router: _Router, arrived: _Arrived, now: float) -> None:
        number, request, prompt = arrived
        name, overlap = router.place(prompt, now)
        at = self._by_name[name]
        self._placed[number] = _Placed(at, now, overlap * self._settings.workers[at].block_size)
        machine = self._workers[at]
        token_ids = request.token_ids(VOCAB_SIZE)
        key = prompt.key
        machine.submit(number, key, token_ids, request.output_tokens, Domain(request.tenant), request.priority, now)

    def _progress(self, progress: RequestProgress) -> None:
        number = progress.number
        if progress.cached_tokens is not None:
            self._first[number] = progress
        if progress.end is None:
            return
        first, placed = self._first.pop(number), self._placed.pop(number)
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
