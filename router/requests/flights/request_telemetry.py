"""Log lines, metrics and trace spans of a request while a router holds it. Its end is logged with its terminal."""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import structlog

from tokenbus.protocol.telemetry import long_waits, tracing
from tokenbus.protocol.telemetry.long_waits import LongWaits, WaitLog
from tokenbus.protocol.wire import block_hash
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.telemetry.metrics import RouterMetrics


class RequestLogSettings(NamedTuple):
    """These may change while requests are in flight."""

    slow_wait_s: float = long_waits.FIRST_S
    """A request that waits this long is logged, and again each time its wait has doubled."""
    log_prompt_chars: int = 0
    """Characters of each prompt that are logged."""


class FlightTelemetry:
    """Reports on the requests of one router."""

    def __init__(self, metrics: RouterMetrics, tracer: tracing.Tracer, settings: RequestLogSettings) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._tokenizing = metrics.phases.labels("tokenize")
        self._log = structlog.get_logger()
        self.settings = settings
        self._waits = WaitLog()

    def __repr__(self) -> str:
        return f"<FlightTelemetry {self.settings}>"

    def received(self, flight: Flight, headers: tracing.Headers) -> None:
        """Starts the request's span, in the trace that the message's `headers` name if they do."""
        known = {
            tracing.MODEL: flight.model,
            tracing.REQUEST_ID: flight.request_id,
            tracing.TENANT: flight.tenant,
            tracing.KEY_ID: flight.address.key_id or None,
        }
        flight.span = tracing.start_span(self._tracer, "route", "server", headers, known, flight.received_at)
        flight.slow_wait = long_waits.BackoffTimer(self.settings.slow_wait_s)
        self._log.debug("request_received", request_id=flight.key, model=flight.model)
        if max_chars := self.settings.log_prompt_chars:
            request = flight.request
            if request.messages:
                text = validation.message_text(request.messages[-1])
            elif isinstance(request.token_ids, bytes):
                first = request.token_ids[: block_hash.TOKEN_BYTES * max_chars]
                text = str(block_hash.unpack_token_ids(first).tolist())
            else:
                text = request.prompt or ""
            self._log.info("request_prompt", request_id=flight.key, prompt=text[:max_chars])

    def adopted(self, flight: Flight) -> None:
        """Records a request taken over from another router."""
        flight.slow_wait = long_waits.BackoffTimer(self.settings.slow_wait_s)
        self._metrics.adopted.labels(flight.model).inc()
        self._log.info(
            "request_adopted", request_id=flight.key, model=flight.model, worker_id=flight.attempt_worker_id or None
        )

    def model_found(self, flight: Flight) -> None:
        """Counts the request. Only requests for known models are counted by name: clients can make up any number."""
        self._metrics.received.labels(flight.model).inc()

    def rerouted(self, flight: Flight, worker_id: str, now: float) -> None:
        """Starts a span and a new wait, because the request's worker seems to be lost."""
        flight.span = flight.span.start_child("reroute", attributes={tracing.WORKER_ID: worker_id})
        flight.waiting_since, flight.slow_wait = now, long_waits.BackoffTimer(self.settings.slow_wait_s)

    def forgotten(self, num_requests: int) -> None:
        """Counts requests that can no longer survive their worker because there is no memory for their prompts."""
        if num_requests:
            self._metrics.prompts_forgotten.inc(num_requests)
            self._log.warning("prompts_forgotten", count=num_requests)

    @contextlib.contextmanager
    def tokenizing(self, flight: Flight) -> Iterator[None]:
        """Measures the block in which the prompt is tokenized."""
        began = time.perf_counter()
        with flight.span.start_child("tokenize"):
            yield
        seconds = time.perf_counter() - began
        flight.way.tokenize_s += seconds
        self._tokenizing.observe(seconds)

    def note_if_slow(self, flight: Flight, now: float) -> None:
        """Notes what an unaccepted request is waiting for, if a log line is due; `log_waits` writes it."""
        waited_s = now - flight.waiting_since
        if not flight.slow_wait.is_due(waited_s):
            return
        stage = "tokenize" if flight.prompt_ids is None and not flight.attempt else "place"
        stage = "accept" if flight.awaiting_worker_id is not None else stage
        self._waits.add(
            LongWaits(stage, 1, waited_s, flight.key, flight.attempt, flight.awaiting_worker_id, flight.model)
        )

    def log_waits(self, now: float) -> None:
        """Logs the long waits of the last second, if there were any."""
        for wait in self._waits.take_due(now):
            self._log.warning(
                "request_waiting",
                request_id=wait.request_id,
                model=wait.model,
                waits_for=wait.waits_for,
                worker_id=wait.worker_id,
                attempt=wait.attempt,
                waited_s=round(wait.waited_s, 1),
                count=wait.num_waits,
            )
