"""Applies what workers report, and the loss of workers, to the requests that they have accepted."""

import time

import structlog

from tokenbus.protocol.wire import subjects
from tokenbus.router.fleet.event_log import AppliedSnapshot
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.updates import FleetUpdate, LostWorker
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.requests.flight import Flight, Flights
from tokenbus.router.requests.lifecycle import RequestLifecycle


class Recovery:
    """Keeps the flights of one router in step with its fleet."""

    def __init__(self, fleet: Fleet, flights: Flights, lifecycle: RequestLifecycle, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._flights = flights
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Recovery {self._flights!r}>"

    def apply(self, update: FleetUpdate, address: subjects.WorkerAddress) -> None:
        """Applies one update about a worker. The order matters: a request may start and end within one update."""
        if update.snapshot is not None:
            self._apply_snapshot(update.snapshot, address)
        for flight in self._flights.find_all(update.first_token_sent, address.model):
            self._flights.mark_first_token_sent(flight)
        for flight in self._flights.find_all(update.finished, address.model):
            self._finish(flight, address.worker_id)
        if update.lost is not None:
            self._log.error("worker_epoch_changed", worker_id=address.worker_id, epoch=update.lost.card.epoch)
            self.recover(update.lost, is_certain=True)
        if update.left:
            for flight in self._flights.accepted_by(address):
                self._finish(flight, address.worker_id)

    def recover(self, lost: LostWorker, *, is_certain: bool) -> None:
        """Continues the requests of a lost worker elsewhere. If the loss is not certain, each run is revoked first."""
        flights = self._flights.accepted_by(lost.card.address)
        for flight in flights:
            if is_certain and lost.was_behind:  # the event with its first token may be among those missing
                self._flights.mark_first_token_sent(flight)
            self._lifecycle.recover(flight, lost.card, is_certain=is_certain)
        if not flights:
            self._fleet.remove(lost.card, time.monotonic())

    def _apply_snapshot(self, snapshot: AppliedSnapshot, address: subjects.WorkerAddress) -> None:
        """Makes up for the events that were missed before the snapshot."""
        worker = self._fleet.find(address)
        assert worker is not None, address
        self._metrics.snapshots.inc()
        self._log.info("snapshot_applied", worker_id=address.worker_id, running=len(snapshot.running))
        for flight in self._flights.accepted_by(address):
            running = snapshot.running.get(flight.key)
            if running is not None and running.first_token_sent:
                self._flights.mark_first_token_sent(flight)
            elif running is None and flight.accepted_at < snapshot.requested_at:
                self._finish(flight, address.worker_id)
            elif running is None:
                # Accepted after the snapshot, or before it and ended already: only another snapshot can tell.
                self._fleet.mark_behind(worker.card)

    def _finish(self, flight: Flight, worker_id: str) -> None:
        flight.ended_by = worker_id
        if worker_id in (flight.worker_id, flight.awaiting_worker_id):
            self._lifecycle.finish(flight)
