"""What a bench has shown, in numbers: the fields of its JSON file (docs/bench.md); pure."""

import msgspec

from tokenbus.protocol.wire import messages
from tokenbus.replay.load.histogram import Spread
from tokenbus.replay.load.points import Kind, Point
from tokenbus.replay.load.tally import Tally


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the sweep. Times are those that a client sees, from the moment at which its request was due."""

    load: Kind
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
    ttft_ms: Spread
    """To the first token, of all requests that had one."""
    itl_ms: Spread
    """From one token to the next, over all such gaps; tokens of one chunk share its gap."""
    tpot_ms: Spread
    """The same, but the mean of each finished request: chunks that come in clumps make no difference to it."""
    e2e_ms: Spread
    """To the end, of finished requests."""
    accept_ms: Spread
    """Until a worker has taken it."""
    queue_ms: Spread
    """From there to its first step, as the worker says."""
    late_ms: Spread
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
    def point(self) -> Point:
        return Point(self.load, self.value)


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
    runs: list[Run]


def summarize(point: Point, tally: Tally, *, interrupted: bool) -> Run:
    """The numbers of one run."""
    duration_s = max(tally.last_at - tally.began_at, 1e-9)
    reasons = dict(sorted(tally.finish_reasons.items()))
    return Run(
        load=point.kind,
        value=point.value,
        interrupted=interrupted,
        duration_s=round(duration_s, 3),
        sent=tally.sent,
        finished=tally.finished,
        failed=tally.failed,
        cancelled=tally.in_flight + reasons.get(messages.FinishReason.CANCELLED, 0),
        not_sent=tally.not_sent,
        peak_in_flight=tally.peak_in_flight,
        finish_reasons=reasons,
        errors=dict(sorted(tally.errors.items())),
        error_examples=dict(sorted(tally.examples.items())),
        workers=dict(sorted(tally.workers.items())),
        **{name: histogram.spread() for name, histogram in tally.times.items()},
        requests_per_s=round(tally.finished / duration_s, 3),
        output_tokens_per_s=round(tally.output_tokens / duration_s, 3),
        output_tokens=tally.output_tokens,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        cached_share=round(tally.cached_tokens / tally.prompt_tokens, 4) if tally.prompt_tokens else None,
    )


def as_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
