"""The page of a replay: its numbers as plots; pure."""

from collections.abc import Callable, Sequence

from tokenbus.replay.offline import ReplaySettings
from tokenbus.replay.page import document
from tokenbus.replay.results import LatencyStats, PolicyResult
from tokenbus.replay.svg import Axis, Series, bar_chart

_PARTS = ("mean", "p50", "p90", "p99")


def page(settings: ReplaySettings, runs: Sequence[PolicyResult], name: str) -> str:
    """Policies side by side."""
    said = f"{settings.workers} workers of {settings.kv_blocks:,} blocks of {settings.block_size} tokens, "
    said += f"speed {settings.speedup:g}, timing {settings.timing}, seed {settings.seed}"
    policies = [run.policy for run in runs]
    rates = [
        Series("real", [(place, run.hit_rate) for place, run in enumerate(runs)]),
        Series("expected by the router", [(place, run.predicted_rate) for place, run in enumerate(runs)]),
    ]
    plots = [
        bar_chart("Prompt tokens that were cached", policies, rates, Axis("share")),
        _times("Time to first token", runs, lambda run: run.ttft_ms),
        _times("From token to token", runs, lambda run: run.itl_ms),
        _times("Whole requests", runs, lambda run: run.e2e_ms),
        _shares(runs),
    ]
    return document(f"Replay of {name}", [f"<p>{said}</p>", '<div class="plots">', *plots, "</div>"])


def _times(title: str, runs: Sequence[PolicyResult], of: Callable[[PolicyResult], LatencyStats]) -> str:
    series = [
        Series(run.policy, [(place, getattr(of(run), part)) for place, part in enumerate(_PARTS)]) for run in runs
    ]
    return bar_chart(title, _PARTS, series, Axis("ms", is_log=True))


def _shares(runs: Sequence[PolicyResult]) -> str:
    """Requests by worker, the busiest first."""
    most = min(32, len(runs[0].requests_per_worker))
    series = [
        Series(run.policy, list(enumerate(map(float, sorted(run.requests_per_worker, reverse=True)[:most]))))
        for run in runs
    ]
    return bar_chart("Requests by worker", [str(1 + place) for place in range(most)], series, Axis("requests"))
