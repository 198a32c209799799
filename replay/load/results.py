"""What a bench has shown, in numbers: the fields of its JSON file (docs/bench.md); pure."""

import msgspec

from tokenbus.protocol.wire import messages
from tokenbus.replay.load.histogram import LatencyStats
from tokenbus.replay.load.points import LoadKind, LoadPoint
from tokenbus.replay.load.stats import RunStats


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the sweep. Times are those that a client sees, from the moment at which its request was due."""

    load: LoadKind
    value: float
    """Clients, requests per second, or times the trace's own speed."""
    interrupted: bool
    """Ctrl-C has ended it."""
    duration_s: float
    """From the start to the last chunk."""
    sent: int
    finished: int
    """Answered without an error."""
    failed: int
    cancelled: int
    """By somebody else, or by Ctrl-C."""
    not_sent: int
    """Due when `--max-in-flight` were in flight."""
    peak_in_flight: int
    finish_reasons: dict[str, int]
    errors: dict[str, int]
    """By code."""
    error_examples: dict[str, str]
    """The first message of each code."""
    workers: dict[str, int]
    """Requests by the worker that ended them."""
    ttft_ms: LatencyStats
    """To the first token, of all requests that had one."""
    itl_ms: LatencyStats
    """From one token to the next, over all such gaps; tokens of one chunk share its gap."""
    tpot_ms: LatencyStats
    """The same, but the mean of each finished request: chunks that come in clumps make no difference to it."""
    e2e_ms: LatencyStats
    """To the end, of finished requests."""
    accept_ms: LatencyStats
    """Until a worker has taken it."""
    queue_ms: LatencyStats
    """From there to its first step, as the worker says."""
    late_ms: LatencyStats
    """By how much the bench itself sent too late; it is part of the other times."""
    requests_per_s: float
    """Finished ones."""
    output_tokens_per_s: float
    output_tokens: int
    """All that came, also of requests that failed later."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that did not have to be computed."""
    cached_share: float | None

    @property
    def point(self) -> LoadPoint:
        return LoadPoint(self.load, self.value)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole sweep."""

    version: int = 1
    """Higher where a field changes its meaning; new fields may come at any time."""
    model: str
    workload: str
    began_at: str
    """UTC, ISO 8601."""
    seed: int
    temperature: float
    skipped: int
    """Requests of the trace that do not fit the model's context and were left out."""
    clipped: int
    """The same, but cut."""
    runs: list[RunResult]


def summarize(point: LoadPoint, stats: RunStats, *, interrupted: bool) -> RunResult:
    """The numbers of one run."""
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
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        cached_share=round(stats.cached_tokens / stats.prompt_tokens, 4) if stats.prompt_tokens else None,
    )


def as_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
