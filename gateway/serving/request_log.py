"""Logs two lines for each request, when it is received and when it has finished; neither contains any of its text."""

import time

import structlog

from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.serving.answer_events import total_usage
from tokenbus.protocol.http.http_server import Disconnect
from tokenbus.protocol.wire import messages, subjects

_MAX_MODEL = 128


class RequestLog:
    """Collects what is logged and measured about one request."""

    def __init__(self, request_id: str, metrics: GatewayMetrics, endpoint: str = "") -> None:
        """`endpoint` is the requested path."""
        self.request_id = request_id
        self._metrics = metrics
        self._endpoint = endpoint
        self._began = time.monotonic()
        self.tenant: str | None = None
        self.key_id: str | None = None
        self._was_logged = False
        self._first_s: float | None = None
        self._terminals: dict[int, messages.Chunk] = {}
        """By choice, in order of arrival."""
        self.usage: messages.Usage | None = None
        """The tokens of a call; those of completions are in the terminals."""
        self._resubmitted_as: str | None = None
        self.code: str | None = None
        """The code of the error with which the request was refused."""
        self._log = structlog.get_logger()

    @property
    def age_s(self) -> float:
        """Seconds since the request was received."""
        return time.monotonic() - self._began

    @property
    def _key(self) -> str:
        """The request's name in the logs of routers and workers."""
        return subjects.request_key(self.tenant, self.request_id) if self.tenant else self.request_id

    def received(self, model: str | None = None, *, stream: bool | None = None, body_bytes: int = 0) -> None:
        """Writes the first line; `model` is None if the request could not be parsed."""
        self._was_logged = True
        self._log.info(
            "request_received",
            request_id=self._key,
            key_id=self.key_id,
            endpoint=self._endpoint,
            model=None if model is None else model[:_MAX_MODEL],
            stream=stream,
            body_bytes=body_bytes,
        )

    def on_chunk(self, chunk: messages.Chunk, choice: int = 0) -> None:
        """Records the time of the first token, the id under which the request was resubmitted, and the terminals."""
        if chunk.tokens and self._first_s is None:
            self._first_s = self.age_s
        if not chunk.id.startswith(self.request_id):
            self._resubmitted_as = chunk.id
        if chunk.finish_reason is not None:
            self._terminals[choice] = chunk

    def finished(self, status: int | None, disconnect: Disconnect | None = None) -> None:
        """Writes the last line, and counts the request. `status` is None if nothing was sent, and `disconnect` says how
        the client was lost, if that happened before it had its whole answer."""
        if not self._was_logged:
            self.received()
        terminals = self._terminals
        terminal = terminals[next(reversed(terminals))] if terminals else None
        usages = {choice: one.usage for choice, one in terminals.items() if one.usage}
        usage = total_usage(usages) or self.usage
        error = terminal.error if terminal and terminal.error else None
        reason = terminal.finish_reason if terminal else messages.FinishReason.CANCELLED if disconnect else None
        self._count(status, usage, disconnect)
        self._log.info(
            "request_finished",
            request_id=self._key,
            resubmitted_as=self._resubmitted_as,
            status=status,
            finish_reason=reason,
            stopped_by=terminal.stopped_by or None if terminal else None,
            code=str(error.code) if error else self.code,
            disconnect=disconnect,
            worker_id=terminal.worker_id or None if terminal else None,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            completion_tokens=usage.completion_tokens if usage else 0,
            cached_tokens=usage.cached_tokens if usage else 0,
            ttft_ms=None if self._first_s is None else round(self._first_s * 1e3, 3),
            total_ms=round(self.age_s * 1e3, 3),
        )

    def _count(self, status: int | None, usage: messages.Usage | None, disconnect: Disconnect | None) -> None:
        metrics = self._metrics
        metrics.finished.labels(self._endpoint, str(status or "none")).inc()
        if disconnect is not None:
            metrics.disconnects.labels(disconnect).inc()
        metrics.resubmitted.inc(self._resubmitted_as is not None)
        metrics.e2e.labels(self._endpoint).observe(self.age_s)
        if self._first_s is not None:
            metrics.ttft.observe(self._first_s)
        if usage is not None:
            metrics.prompt_tokens.inc(usage.prompt_tokens)
            metrics.completion_tokens.inc(usage.completion_tokens)
