"""Applies what workers report, and the loss of workers, to the requests that they have accepted (decision 0048).

A router is the guardian of a request that it has placed, or has taken over from another router: it learns of every
token before the client does. When the worker is lost or leaves, it has everything that another worker needs to continue
the stream."""

import itertools
from collections.abc import Sequence

import structlog

from tokenbus.protocol.wire import block_hash, internal, messages, subjects
from tokenbus.router.fleet.fleet import Fleet, FleetUpdate
from tokenbus.router.requests.attempts import Attempts
from tokenbus.router.requests.flights.ends import BY_WORKER
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.lifecycle import RequestLifecycle
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.event_log import AppliedSnapshot
from tokenbus.router.workers.worker import Worker, incarnation_key

_KNOWN_BYTES = 16
"""Bytes that a snapshot request takes for each request that it names, in addition to its key."""


class Recovery:
    """Keeps the flights of one router in step with its fleet."""

    def __init__(
        self,
        fleet: Fleet,
        flights: Flights,
        attempts: Attempts,
        lifecycle: RequestLifecycle,
        metrics: RouterMetrics,
        router_id: str,
    ) -> None:
        self._fleet = fleet
        self._flights = flights
        self._attempts = attempts
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._router_id = router_id
        self._log = structlog.get_logger()

    def apply(self, update: FleetUpdate, address: subjects.WorkerAddress) -> None:
        """Applies one update about a worker. The order matters: a request may start and end within one update."""
        if update.snapshot is not None:
            assert update.worker is not None
            self._apply_snapshot(update.snapshot, update.worker)
        for entry in update.entries:
            assert update.worker is not None
            self._apply_tokens(entry, update.worker)
            for stream_no, router_id in entry.guardians.items():
                self._apply_guardian(self._flights.streams_of(update.worker.incarnation).get(stream_no), router_id)
            self._take_stranded(entry.stranded, update.worker)
        ends = {end.id: end for end in update.ends}
        for flight in self._flights.find_all(update.finished, address.model):
            flight.end = ends.get(flight.key)
            self._finish(flight, address.worker_id)
        if update.lost is not None:
            self._log.error("worker_epoch_changed", worker_id=address.worker_id, epoch=update.lost.card.epoch)
            self.recover(update.lost, is_certain=True)
        worker = self._fleet.find_worker(address)
        if worker is not None and worker.state is messages.WorkerState.LEAVING:
            self._take_streams(worker)
        if update.left:
            for flight in self._flights.accepted_by(address):
                self._lifecycle.forget(flight, BY_WORKER)

    def note_fences(self, card: messages.Card) -> None:
        """Takes back that workers have died which had only fenced themselves, as the card of their next epoch says."""
        ended = [one for one in (card.previous, *card.earlier) if one is not None]
        for flight in self._flights.all() if ended else ():
            for one in ended:
                flight.completion.has_fenced(incarnation_key(card.address, one.epoch))

    def recover(self, lost: Worker, *, is_certain: bool) -> None:
        """Continues a lost worker's requests elsewhere. If the loss is not certain, each run is revoked first."""
        is_revoked = False
        for flight in self._flights.accepted_by(lost.card.address):
            if flight.is_named:
                self._lifecycle.recover(flight, lost, is_certain=is_certain)
                is_revoked = True
            else:  # there is no telling which router the worker was going to name
                self._lifecycle.forget(flight, "without_guardian")
        if not is_revoked:  # otherwise the replies to the drops decide whether the worker is gone
            self._fleet.remove(lost.card)

    def snapshot_request(self, worker: Worker, max_bytes: int) -> internal.SnapshotRequest:
        """Returns a request for the tokens that this router lacks, of each of its requests that a worker has or may
        have. If not all names fit in a message of `max_bytes`, it names those with the most known tokens of the current
        attempt."""
        flights = self._flights.accepted_by(worker.card.address)
        flights += [one for one in self._flights.unaccepted() if _is_sent_to(one, worker)]
        flights = [flight for flight in flights if flight.prompt_ids is not None]
        flights.sort(key=lambda flight: flight.attempt_offset - len(flight.completion))
        sizes = itertools.accumulate(len(flight.key) + _KNOWN_BYTES for flight in flights)
        fitting = itertools.takewhile(lambda pair: pair[1] <= max_bytes, zip(flights, sizes, strict=True))
        known = {flight.key: len(flight.completion) for flight, _ in fitting}
        return internal.SnapshotRequest(known_tokens=known, wants_others=len(known) < len(flights))

    def _take_streams(self, leaving: Worker) -> None:
        """Takes the requests of a leaving worker, to continue them elsewhere. Those whose prompts were forgotten must
        end there. While events are missing, this router can't tell whether it is still their guardian."""
        if leaving.log.is_behind:
            return
        for flight in self._flights.accepted_by(leaving.card.address):
            if flight.is_named and flight.prompt_ids is not None:
                self._lifecycle.recover(flight, leaving, is_certain=False, takes=True)

    def _take_stranded(self, keys: Sequence[str], worker: Worker) -> None:
        """Takes requests that a worker has and can't continue. The worker repeats its report until they are taken."""
        address = worker.card.address
        for flight in self._flights.find_all(keys, address.model):
            if flight.worker_id == address.worker_id and flight.is_named and flight.prompt_ids is not None:
                self._lifecycle.recover(flight, worker, is_certain=False, takes=True)

    def _apply_guardian(self, flight: Flight | None, router_id: str) -> None:
        """Notes which router a worker's log names as the guardian of one of this router's requests, if it names any."""
        if flight is None or not router_id:
            return
        if router_id == self._router_id:
            flight.is_named = True
        elif flight.worker_id is not None:
            self._lifecycle.forget(flight, "by_router")

    def _apply_tokens(self, entry: internal.Events, worker: Worker) -> None:
        """Keeps the tokens of this router's requests."""
        for started in entry.started:
            if (flight := self._find(worker, started.id, started.attempt)) is not None:
                self._flights.bind_stream(flight, worker.incarnation, started.stream_no)
        streams = self._flights.streams_of(worker.incarnation)
        if not streams:
            return
        stream_nos = block_hash.unpack_token_ids(entry.stream_nos)
        for stream_no, token_id in zip(stream_nos, block_hash.unpack_token_ids(entry.token_ids), strict=True):
            if (flight := streams.get(stream_no)) is not None:
                flight.completion.append(token_id, entry.seq)
                if flight.way.is_paused:
                    flight.way.continued(worker.last_seen_at)
        for stream_no, logprobs in entry.logprobs.items():
            if (flight := streams.get(stream_no)) is not None:
                flight.completion.logprobs += logprobs
        for first in entry.first_tokens:
            if (flight := streams.get(first.stream_no)) is not None and flight.completion.first_token is None:
                flight.completion.first_token = first

    def _find(self, worker: Worker, key: str, attempt: int) -> Flight | None:
        """Returns this router's request that a worker says it runs, if the worker runs the current attempt and the
        request could continue elsewhere.

        A worker that was given up as lost but still runs an earlier attempt is told to stop."""
        flight = self._flights.find_flight(key)
        if flight is None or flight.model != worker.card.model:
            return None
        if attempt < flight.attempt:
            self._metrics.stale_attempts.inc()
            self._attempts.move(flight, worker.card.address, attempt)
        if flight.prompt_ids is None:  # forgotten to free memory: its tokens are no longer of use
            return None
        return flight if attempt == flight.attempt and _is_sent_to(flight, worker) else None

    def _apply_snapshot(self, snapshot: AppliedSnapshot, worker: Worker) -> None:
        """Makes up for the events that were missed before the snapshot."""
        address, ends = worker.card.address, {end.id: end for end in snapshot.ends}
        self._metrics.snapshots.inc()
        self._log.info("snapshot_applied", worker_id=address.worker_id, running=len(snapshot.running))
        for key, running in snapshot.running.items():
            if (flight := self._find(worker, key, running.attempt)) is None:
                continue
            if flight.completion.restore(running, snapshot.seq):
                flight.lacks_tokens = False
                self._flights.bind_stream(flight, worker.incarnation, running.stream_no)
            else:
                # it was placed there after the snapshot was asked for: the next one will have its tokens
                self._flights.unbind_stream(flight)
                self._fleet.mark_behind(worker.card)
        for flight in self._flights.accepted_by(address):
            if (one := snapshot.running.get(flight.key)) is not None:
                self._apply_guardian(flight, one.router_id)
            elif (end := ends.get(flight.key)) is not None:
                flight.end = end
                self._attempts.repeat_end(flight, worker.card)
                self._finish(flight, address.worker_id)
            elif flight.accepted_at < snapshot.requested_at:  # it may have had another guardian in the end
                self._attempts.repeat_end(flight, worker.card)
                self._lifecycle.forget(flight, BY_WORKER)
            else:
                # Accepted after the snapshot, or accepted before it and already ended: only another snapshot can tell.
                self._fleet.mark_behind(worker.card)

        for flight in self._flights.unaccepted():  # it may have ended while this router counted the worker as lost
            end = None if flight.key in snapshot.running else ends.get(flight.key)
            if end is not None and flight.has_new_tokens and _is_sent_to(flight, worker):
                flight.end = end
                self._attempts.repeat_end(flight, worker.card)
                self._finish(flight, address.worker_id)

    def _finish(self, flight: Flight, worker_id: str) -> None:
        flight.ended_by = worker_id
        if worker_id in (flight.worker_id, flight.awaiting_worker_id):
            self._lifecycle.finish(flight)


def _is_sent_to(flight: Flight, worker: Worker) -> bool:
    """Returns whether the request's current attempt was sent to this worker."""
    return (flight.model, flight.attempt_worker_id) == worker.card.address
