"""The trace span of one stream at its worker, with a child span for each stage of it."""

from itertools import pairwise

from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import internal, messages, subjects


def begin(
    tracer: tracing.Tracer, run: internal.Run, headers: tracing.Headers, model: str, worker_id: str
) -> tracing.Span:
    """Starts a span below that of the router that dispatched the request."""
    known: tracing.Attributes = {
        tracing.MODEL: model,
        tracing.REQUEST_ID: subjects.key_to_request_id(run.request_id),
        tracing.TENANT: subjects.key_to_tenant(run.request_id),
        tracing.WORKER_ID: worker_id,
        tracing.ATTEMPT: run.attempt,
    }
    return tracing.start_span(tracer, "generate", "server", headers, known)


def end(span: tracing.Span, accepted_at: float, terminal: messages.Chunk) -> None:
    """Ends a span as its stream ended; the terminal's timings count from `accepted_at`."""
    if not span.is_recording:
        return
    span.set_attributes(tracing.terminal_attributes(terminal))
    if terminal.error:
        span.set_error(str(terminal.error.code))
    if terminal.timings:
        _add_stages(span, accepted_at, terminal.timings)
    span.end()


def _add_stages(span: tracing.Span, accepted_at: float, timings: messages.Timings) -> None:
    """Adds child spans for queue, prefill and decode, as far as the stream got."""
    marks, at = [accepted_at], accepted_at
    for spent_ms in (timings.queue_ms, timings.prefill_ms, timings.decode_ms):
        at += spent_ms / 1e3
        marks.append(at)
    for name, (began_at, ended_at) in zip(("queue", "prefill", "decode"), pairwise(marks), strict=True):
        if ended_at > began_at:
            span.start_child(name, began_at=began_at).end(ended_at)
