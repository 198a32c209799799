"""What the requests of a router leave behind before they end: lines in the log, counts, spans."""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import structlog

from tokenbus.protocol.telemetry import backoff, tracing
from tokenbus.protocol.wire import messages, validation
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.requests.flight import Flight


class RequestLogSettings(NamedTuple):
    """May be set while requests are under way."""

    slow_wait_s: float = backoff.FIRST_S
    """A request that has waited so long leaves a line, and another each time that has doubled."""
    log_prompt_chars: int = 0
    """So much of the beginning of each prompt is logged."""


class RequestTelemetry:
    """Of one router."""

    def __init__(self, metrics: RouterMetrics, tracer: tracing.Tracer, settings: RequestLogSettings) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._tokenizing = metrics.phases.labels("tokenize")
        self._log = structlog.get_logger()
        self.settings = settings

    def __repr__(self) -> str:
        return f"<Journal {self.settings}>"

    def came(self, flight: Flight, headers: tracing.Headers) -> None:
        """A request was taken; `headers` of its message may say which trace it belongs to."""
        known = {tracing.MODEL: flight.model, tracing.REQUEST_ID: flight.request_id, tracing.TENANT: flight.tenant}
        flight.span = tracing.start_span(self._tracer, "route", "server", headers, known, flight.received_at)
        flight.slow = backoff.BackoffTimer(self.settings.slow_wait_s)
        self._log.info("request_received", request_id=flight.key, model=flight.model)
        if most := self.settings.log_prompt_chars:
            self._log.info("request_prompt", request_id=flight.key, prompt=_beginning(flight.request, most))

    def came_back(self, flight: Flight, worker_id: str, now: float) -> None:
        """Its worker seems to be lost: it waits for another."""
        flight.span = flight.span.start_child("reroute", attributes={tracing.WORKER_ID: worker_id})
        flight.waits_since, flight.slow = now, backoff.BackoffTimer(self.settings.slow_wait_s)

    def found(self, flight: Flight) -> None:
        """Its model is served; other names are not counted, since there is no end of them."""
        self._metrics.received.labels(flight.model).inc()

    @contextlib.contextmanager
    def tokenizing(self, flight: Flight) -> Iterator[None]:
        """While its prompt becomes token ids."""
        began = time.perf_counter()
        with flight.span.start_child("tokenize"):
            yield
        self._tokenizing.observe(time.perf_counter() - began)

    def still_waits(self, flight: Flight, now: float) -> None:
        """Leaves a line from time to time while no worker has accepted it."""
        waited_s = now - flight.waits_since
        if flight.slow.is_due(waited_s):
            self._log.warning(
                "request_waiting",
                request_id=flight.key,
                model=flight.model,
                waits_for=_stage(flight),
                worker_id=flight.awaiting,
                attempt=flight.attempt,
                waited_s=round(waited_s, 1),
            )


def _stage(flight: Flight) -> str:
    """What it waits for."""
    if flight.awaiting is not None:
        return "accept"
    return "tokenize" if flight.prompt_ids is None and not flight.attempt else "place"


def _beginning(asked: messages.GenerateRequest, most: int) -> str:
    """Of a prompt as it was sent, or of a conversation's last message."""
    if asked.messages:
        return validation.message_text(asked.messages[-1])[:most]
    return str(asked.token_ids[:most])[:most] if asked.token_ids is not None else (asked.prompt or "")[:most]
