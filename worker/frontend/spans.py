"""The span of one stream at its worker, and, below it, where the stream's time went."""

from itertools import pairwise

from tokenbus.protocol.telemetry import traces
from tokenbus.protocol.wire import internal, messages, subjects


def begin(traced: traces.Traces, run: internal.Run, headers: traces.Headers, model: str, worker_id: str) -> traces.Span:
    """Below the span of the router that dispatched the request."""
    known: traces.Attributes = {
        traces.MODEL: model,
        traces.REQUEST_ID: subjects.key_to_request_id(run.request_id),
        traces.TENANT: subjects.key_to_tenant(run.request_id),
        traces.WORKER_ID: worker_id,
        traces.ATTEMPT: run.attempt,
    }
    return traced.begin("generate", "server", headers, known)


def end(span: traces.Span, accepted_at: float, terminal: messages.Chunk) -> None:
    """Ends it as its stream ended; `accepted_at` is where the terminal's timings begin."""
    if not span.is_recorded:
        return
    span.add(traces.of_terminal(terminal))
    if terminal.error:
        span.fail(str(terminal.error.code))
    if terminal.timings:
        _stretches(span, accepted_at, terminal.timings)
    span.end()


def _stretches(span: traces.Span, accepted_at: float, timings: messages.Timings) -> None:
    """queue, prefill and decode, one after another, as far as the stream came."""
    marks, at = [accepted_at], accepted_at
    for spent_ms in (timings.queue_ms, timings.prefill_ms, timings.decode_ms):
        at += spent_ms / 1e3
        marks.append(at)
    for name, (began_at, ended_at) in zip(("queue", "prefill", "decode"), pairwise(marks), strict=True):
        if ended_at > began_at:
            span.child(name, began_at=began_at).end(ended_at)
