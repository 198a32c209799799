"""Logs, counts and traces the requests of one worker: always one line at the start and one at the end."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import structlog

from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.telemetry.long_waits import LongWaits, WaitLog
from tokenbus.protocol.wire import errors, messages, subjects
from tokenbus.worker.contract import engine_request
from tokenbus.worker.streams.stream import LongPrompt, WorkerStream
from tokenbus.worker.telemetry.metrics import ReplicaMetrics


class StreamTelemetry:
    """Records what happens to streams; it changes nothing about them but their span."""

    def __init__(self, metrics: ReplicaMetrics, tracer: tracing.Tracer, model: str, worker_id: str) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._model = model
        self._worker_id = worker_id
        self._waits = WaitLog()
        self._log = structlog.get_logger().bind(worker_id=worker_id)

    def started(
        self,
        stream: WorkerStream,
        request: engine_request.EngineRequest,
        headers: tracing.Headers,
        load: messages.Load,
        health: messages.WorkerHealth | None,
    ) -> None:
        """Records the start of a stream. Its span is a child of the dispatching router's, if `headers` name one."""
        attributes: tracing.Attributes = {
            tracing.MODEL: self._model,
            tracing.REQUEST_ID: subjects.key_to_request_id(stream.key),
            tracing.TENANT: subjects.key_to_tenant(stream.key),
            tracing.WORKER_ID: self._worker_id,
            tracing.ATTEMPT: stream.run.attempt,
        }
        stream.span = tracing.start_span(self._tracer, "generate", "server", headers, attributes)
        constraint = request.constraint
        if constraint is not None:
            self._metrics.constrained.labels(constraint.kind).inc()
        self._log.info(
            "request_started",
            request_id=stream.key,
            attempt=stream.run.attempt,
            prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
            max_reasoning_tokens=stream.max_reasoning_tokens,
            resumed_tokens=len(request.resumed.token_ids) if request.resumed else None,
            constraint=constraint.kind if constraint is not None else None,
            sampling=_sampling(request),
            free_blocks=load.free_blocks,
            free_mib={one.name: one.free_bytes >> 20 for one in health.devices} if health is not None else None,
        )
        asked = stream.run.params.reasoning
        if asked is not None and asked.max_tokens is not None and stream.max_reasoning_tokens is None:
            self._log.info(
                "reasoning_limit_ignored",
                request_id=stream.key,
                max_reasoning_tokens=asked.max_tokens,
            )

    def prompt_progress(self, stream: WorkerStream, computed_tokens: int, cached_tokens: int, now: float) -> None:
        """Records a prompt's progress. A prompt that takes long is logged after two seconds, again each time that
        doubles, and when it is done."""
        if stream.long_prompt is None:
            stream.long_prompt = LongPrompt(computed_tokens, now)
        num_tokens, long = stream.num_prompt_tokens, stream.long_prompt
        if not long.is_due(now, is_computed=computed_tokens >= num_tokens):
            return
        self._log.info(
            "prompt_computing",
            request_id=stream.key,
            prompt_tokens=num_tokens,
            computed_tokens=computed_tokens,
            cached_tokens=cached_tokens,
            tokens_per_s=round(long.tokens_per_s(computed_tokens, now), 1),
            duration_ms=round(long.seconds(now) * 1e3),
        )

    def refused(self, code: errors.Code) -> None:
        """Counts a refused run; the router logs it."""
        self._metrics.refused.labels(code).inc()

    def waits(self, stream: WorkerStream, waited_s: float) -> None:
        """Notes that a stream has waited long for its first token, for `log_waits`."""
        self._waits.add(
            LongWaits("first_token", 1, waited_s, stream.key, stream.run.attempt, self._worker_id, self._model)
        )

    def log_waits(self, load_of: Callable[[], messages.Load], now: float) -> None:
        """Logs the long waits of the last second, if there were any, and how busy the engine is."""
        for wait in self._waits.take_due(now):
            load = load_of()
            self._log.warning(
                "request_waiting",
                request_id=wait.request_id,
                attempt=wait.attempt,
                waits_for=wait.waits_for,
                waited_s=round(wait.waited_s, 1),
                count=wait.num_waits,
                running=load.running,
                waiting=load.waiting,
                step_age_ms=round(load.step_age_ms),
            )

    def replayed(self, stream: WorkerStream, offset: int) -> None:
        """Records that a client asks for lost chunks for the first time."""
        self._log.info("stream_replayed", request_id=stream.key, offset=offset)

    def held(self, stream: WorkerStream) -> None:
        """Records that nothing can be published for a stream."""
        self._metrics.held_streams.inc()

    def released(self, stream: WorkerStream, held_s: float, lacked_tokens: int) -> None:
        """Records that a held stream flows again."""
        self._metrics.released_streams.inc()
        self._log.info("stream_released", request_id=stream.key, held_s=round(held_s, 2), tokens=lacked_tokens)

    def link_suspected(self, routers: Sequence[str], num_streams: int) -> None:
        """Records that none of these distant routers can be reached while streams are held."""
        self._log.warning("link_suspected", routers=routers, streams=num_streams)

    def link_back(self, num_streams: int) -> None:
        """Records that some of them can, or that no stream is held any more."""
        self._log.info("link_back", streams=num_streams)

    def client_gone(self, stream: WorkerStream, held_s: float) -> None:
        """Records that a stream's client is gone."""
        self._metrics.clients_gone.inc()
        self._log.info("client_gone", request_id=stream.key, held_s=round(held_s, 2))

    def failed(self, stream: WorkerStream) -> None:
        """Records a bug that is about to end a stream; call it from the `except` clause."""
        self._log.exception("stream_failed", request_id=stream.key)

    def abandoned(self, stream: WorkerStream, reason: str) -> None:
        """Records the end of a stream without a terminal."""
        self._metrics.request_finished(reason, None, None)
        self._log.info(
            "request_finished",
            request_id=stream.key,
            attempt=stream.run.attempt,
            finish_reason=reason,
        )
        stream.span.set_error(reason)
        stream.span.end()

    def finished(self, stream: WorkerStream, terminal: messages.Chunk) -> None:
        """Records the end of a stream whose terminal is published."""
        code = terminal.error.code if terminal.error else None
        usage, timings = terminal.usage or None, terminal.timings or None
        stopped_by = terminal.stopped_by or None
        self._metrics.request_finished(
            "stopped" if stopped_by else str(code or terminal.finish_reason),
            usage,
            timings,
            has_failed=has_failed(terminal),
        )
        reasoning_tokens = (usage.reasoning_tokens or None) if usage else None
        limit = stream.max_reasoning_tokens
        # the tokens that close it push the count above the limit
        is_spent = limit is not None and reasoning_tokens is not None and reasoning_tokens > limit
        if reasoning_tokens or stream.num_tool_calls:
            is_complete = terminal.finish_reason is messages.FinishReason.TOOL_CALLS
            num_incomplete = bool(stream.num_tool_calls) and stream.is_streamed and not is_complete  # the last call
            self._metrics.reasoning_tokens.inc(reasoning_tokens or 0)
            self._metrics.reasoning_budgets_spent.inc(is_spent)
            self._metrics.tool_calls.labels("true").inc(stream.num_tool_calls - num_incomplete)
            self._metrics.tool_calls.labels("false").inc(num_incomplete)
        self._log.info(
            "request_finished",
            request_id=stream.key,
            attempt=terminal.attempt,
            finish_reason=terminal.finish_reason,
            stopped_by=stopped_by,
            code=code,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            reasoning_tokens=reasoning_tokens,
            reasoning_budget_spent=is_spent or None,
            tool_calls=stream.num_tool_calls or None,
            queue_ms=timings.queue_ms if timings else None,
            ttft_ms=timings.ttft_ms if timings else None,
            total_ms=timings.total_ms if timings else None,
        )
        if stream.span.is_recording:
            _end_span(stream.span, stream.began_at, terminal)


def _sampling(request: engine_request.EngineRequest) -> dict[str, float]:
    """Returns the sampling parameters that have an effect, without any text."""
    asked = request.sampling
    always = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "seed": asked.seed,
    }
    others = {
        "repetition_penalty": asked.repetition_penalty if asked.repetition_penalty != 1 else 0,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "min_tokens": asked.min_tokens,
        "logit_biases": len(asked.logit_bias),
        "stop_strings": len(request.stop),
        "ignore_eos": asked.ignore_eos,
    }
    return always | {name: value for name, value in others.items() if value}


def has_failed(terminal: messages.Chunk) -> bool:
    """Whether a request failed in a way that need not recur elsewhere."""
    if not terminal.error:
        return False
    return terminal.error.retryable and terminal.error.code is not errors.Code.SHUTTING_DOWN


def _end_span(span: tracing.Span, began_at: float, terminal: messages.Chunk) -> None:
    """Ends a span, with a child for each of queue, prefill and decode as far as the stream got."""
    span.set_attributes(tracing.terminal_attributes(terminal))
    if terminal.error:
        span.set_error(str(terminal.error.code))
    if timings := terminal.timings:
        marks = [began_at]
        for spent_ms in (timings.queue_ms, timings.prefill_ms, timings.decode_ms):
            marks.append(marks[-1] + spent_ms / 1e3)
        for name, (start, end) in zip(("queue", "prefill", "decode"), pairwise(marks), strict=True):
            if end > start:
                span.start_child(name, began_at=start).end(end)
    span.end()
