"""Builders of PromQL expressions. Windows are Grafana's `$__rate_interval`, which is at least four scrapes."""

MODEL_FILTER = 'model=~"$model"'
WORKER_FILTER = 'model=~"$model",worker_id=~"$worker"'
ROUTER_FILTER = 'instance=~"$router"'
MODEL_ROUTER_FILTER = f"{MODEL_FILTER},{ROUTER_FILTER}"


def rate(metric: str, selector: str, by: str = "") -> str:
    """Increase of a counter per second."""
    return f"sum{_by(by)} (rate({metric}{{{selector}}}[$__rate_interval]))"


def increase(metric: str, selector: str, by: str = "") -> str:
    """Increase of a counter within the window."""
    return f"sum{_by(by)} (increase({metric}{{{selector}}}[$__rate_interval]))"


def sum_of(metric: str, selector: str, by: str = "") -> str:
    """Sum of a gauge."""
    return f"sum{_by(by)} ({metric}{{{selector}}})"


def max_of(metric: str, selector: str, by: str = "") -> str:
    """Maximum of a gauge, for what several processes report: every router counts all workers."""
    return f"max{_by(by)} ({metric}{{{selector}}})"


def quantile(share: float, metric: str, selector: str, by: str = "") -> str:
    """Quantile of a histogram, named without its `_bucket`."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', selector, labels)})"


def mean(metric: str, selector: str, by: str = "") -> str:
    """Mean of a histogram."""
    return f"{rate(f'{metric}_sum', selector, by)} / {rate(f'{metric}_count', selector, by)}"


def share_below(metric: str, bound: str, selector: str, by: str = "") -> str:
    """Share of a histogram's observations that are at most `bound`, which must be one of its buckets."""
    below = f'{selector},le="{bound}"'
    return f"{rate(f'{metric}_bucket', below, by)} / {rate(f'{metric}_count', selector, by)}"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
