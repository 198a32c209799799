"""The results of a replay, deterministic for a trace, settings and seed."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from tokenbus.replay.simulation import RequestOutcome
from tokenbus.replay.virtual_worker import DecodeSteps

_DIGITS = 3


class TimeStats(msgspec.Struct, frozen=True):
    """A distribution of times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one policy on one trace."""

    policy: str
    requests: int
    hit_rate: float
    """The share of all prompt tokens that did not have to be computed."""
    fetched_rate: float
    """The share of all prompt tokens whose blocks came from other workers' caches."""
    remote_prefill_rate: float
    """The share of all prompt tokens that one worker computed for another."""
    predicted_rate: float
    """The hit rate that the router predicted."""
    ttft_ms: TimeStats
    """From a request's arrival to its first token."""
    itl_ms: TimeStats
    """From one token of a request to the next, over all gaps."""
    e2e_ms: TimeStats
    """From a request's arrival to its last token."""
    queue_ms: TimeStats
    """From a request's arrival to its placement."""
    output_tokens_per_s: float
    duration_s: float
    """From the first arrival to the last token."""
    requests_per_worker: list[int]
    busiest_share: float
    """The share of all requests that the busiest worker got."""


def summarize(
    policy: str,
    outcomes: Sequence[RequestOutcome],
    steps: Iterable[DecodeSteps],
    num_workers: int,
    fetched_tokens: int = 0,
    remote_prefill_tokens: int = 0,
) -> PolicyResult:
    """Returns the results of one replay, in which at least one request ended."""
    prompt_tokens = sum(one.request.prompt_tokens for one in outcomes)
    began, ended = min(one.arrived_at for one in outcomes), max(one.ended_at for one in outcomes)
    counts = [0] * num_workers
    for one in outcomes:
        counts[one.worker] += 1
    return PolicyResult(
        policy=policy,
        requests=len(outcomes),
        hit_rate=_share(sum(one.cached_tokens for one in outcomes) - remote_prefill_tokens, prompt_tokens),
        fetched_rate=_share(fetched_tokens, prompt_tokens),
        remote_prefill_rate=_share(remote_prefill_tokens, prompt_tokens),
        predicted_rate=_share(sum(one.predicted_tokens for one in outcomes), prompt_tokens),
        ttft_ms=_latency_stats(one.first_at - one.arrived_at for one in outcomes),
        itl_ms=_itl_stats(steps),
        e2e_ms=_latency_stats(one.ended_at - one.arrived_at for one in outcomes),
        queue_ms=_latency_stats(one.placed_at - one.arrived_at for one in outcomes),
        output_tokens_per_s=round(sum(one.request.output_tokens for one in outcomes) / (ended - began), _DIGITS),
        duration_s=round(ended - began, _DIGITS),
        requests_per_worker=counts,
        busiest_share=_share(max(counts), len(outcomes)),
    )


def _share(part: float, whole: float) -> float:
    return round(part / whole, 6)


def _latency_stats(seconds: Iterable[float]) -> TimeStats:
    times = np.fromiter(seconds, float) * 1e3
    mid, high, highest = np.percentile(times, [50, 90, 99])
    return _rounded(float(times.mean()), float(mid), float(high), float(highest))


def _itl_stats(steps: Iterable[DecodeSteps]) -> TimeStats:
    """Weights each step by its sequences, since it is a gap for each of them."""
    gaps: list[float] = []
    weights: list[int] = []
    for several in steps:
        gaps.extend(several.gaps_s)
        weights.extend([several.sequences] * len(several.gaps_s))
    if not gaps:
        return _rounded(0.0, 0.0, 0.0, 0.0)
    times, counts = np.array(gaps) * 1e3, np.array(weights)
    order = np.argsort(times, kind="stable")
    times, below = times[order], np.cumsum(counts[order])
    # percentiles by nearest rank: the first gap that this share of all gaps does not exceed
    places = np.searchsorted(below, np.array([0.5, 0.9, 0.99]) * below[-1])
    mid, high, highest = times[np.minimum(places, len(times) - 1)]
    mean = float((times * counts[order]).sum() / below[-1])
    return _rounded(mean, float(mid), float(high), float(highest))


def _rounded(mean: float, p50: float, p90: float, p99: float) -> TimeStats:
    return TimeStats(round(mean, _DIGITS), round(p50, _DIGITS), round(p90, _DIGITS), round(p99, _DIGITS))
