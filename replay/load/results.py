"""The results of a benchmark, which are the fields of its JSON file (docs/bench.md)."""

import msgspec

from tokenbus.protocol.wire import messages
from tokenbus.replay.load.histogram import LatencyStats
from tokenbus.replay.load.points import LoadKind, LoadPoint
from tokenbus.replay.load.stats import RunStats


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one load point. Times are as seen by a client, measured from when its request was due."""

    load: LoadKind
    value: float
    """Clients, requests per second, or the speedup of the trace."""
    interrupted: bool
    """Whether Ctrl-C ended the run."""
    duration_s: float
    """From the start of the run to the last chunk."""
    sent: int
    finished: int
    """Requests answered without an error."""
    failed: int
    cancelled: int
    """Requests cancelled, by another client or by Ctrl-C."""
    not_sent: int
    """Requests that were due while `--max-in-flight` others were in flight."""
    peak_in_flight: int
    finish_reasons: dict[str, int]
    errors: dict[str, int]
    """Failed requests by error code."""
    error_examples: dict[str, str]
    """The first message of each error code."""
    workers: dict[str, int]
    """Ended requests by worker."""
    ttft_ms: LatencyStats
    """Time to the first token, of all requests that had one."""
    tpot_ms: LatencyStats
    """Time per output token of each finished request: from its first token to its last, divided by the tokens after the
    first. A request whose tokens all arrived at once has none."""
    itl_ms: LatencyStats
    """Inter-token latency: the time from one arrival of a request's tokens to the next, over all of them."""
    tokens_per_arrival: float | None
    """Tokens that a client receives at the same time, on average."""
    e2e_ms: LatencyStats
    """Time to the end, of finished requests."""
    accept_ms: LatencyStats
    """Time until a worker accepted the request."""
    queue_ms: LatencyStats
    """Time from the accept to the first step, as reported by the worker."""
    late_ms: LatencyStats
    """The delay with which the benchmark itself sent the request. All other times include it."""
    requests_per_s: float
    """Finished requests per second."""
    output_tokens_per_s: float
    output_tokens: int
    """All received tokens, including those of requests that failed later."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that did not have to be computed."""
    cached_share: float | None

    @property
    def point(self) -> LoadPoint:
        return LoadPoint(self.load, self.value)


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a sweep."""

    version: int = 2
    """Raised when a field changes its meaning. New fields may be added at any time."""
    model: str
    workload: str
    began_at: str
    """UTC, ISO 8601."""
    seed: int
    temperature: float
    skipped: int
    """Requests of the trace that were skipped because they do not fit the model's context."""
    clipped: int
    """Requests of the trace that were clipped for the same reason."""
    runs: list[RunResult]


def summarize(point: LoadPoint, stats: RunStats, *, interrupted: bool) -> RunResult:
    """Returns the results of one run."""
    duration_s = max(stats.last_at - stats.began_at, 1e-9)
    reasons = dict(sorted(stats.finish_reasons.items()))
    return RunResult(
        load=point.kind,
        value=point.value,
        interrupted=interrupted,
        duration_s=round(duration_s, 3),
        sent=stats.sent,
        finished=stats.finished,
        failed=stats.failed,
        cancelled=stats.in_flight + reasons.get(messages.FinishReason.CANCELLED, 0),
        not_sent=stats.not_sent,
        peak_in_flight=stats.peak_in_flight,
        finish_reasons=reasons,
        errors=dict(sorted(stats.errors.items())),
        error_examples=dict(sorted(stats.examples.items())),
        workers=dict(sorted(stats.workers.items())),
        **{name: histogram.summary() for name, histogram in stats.times.items()},
        requests_per_s=round(stats.finished / duration_s, 3),
        output_tokens_per_s=round(stats.output_tokens / duration_s, 3),
        output_tokens=stats.output_tokens,
        tokens_per_arrival=round(stats.output_tokens / stats.arrivals, 3) if stats.arrivals else None,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        cached_share=round(stats.cached_tokens / stats.prompt_tokens, 4) if stats.prompt_tokens else None,
    )


def as_json(report: LoadReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
