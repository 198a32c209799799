"""The few forms that the expressions have. Windows are Grafana's `$__rate_interval`: at least four scrapes."""

OF_MODELS = 'model=~"$model"'
OF_WORKERS = 'model=~"$model",worker_id=~"$worker"'
OF_ROUTERS = 'instance=~"$router"'
OF_BOTH = f"{OF_MODELS},{OF_ROUTERS}"


def rate(metric: str, where: str, by: str = "") -> str:
    """Of a counter, a second."""
    return f"sum{_by(by)} (rate({metric}{{{where}}}[$__rate_interval]))"


def increase(metric: str, where: str, by: str = "") -> str:
    """Of a counter, within the window."""
    return f"sum{_by(by)} (increase({metric}{{{where}}}[$__rate_interval]))"


def total(metric: str, where: str, by: str = "") -> str:
    """Of a level."""
    return f"sum{_by(by)} ({metric}{{{where}}})"


def highest(metric: str, where: str, by: str = "") -> str:
    """Of a level that several say: every router counts all workers."""
    return f"max{_by(by)} ({metric}{{{where}}})"


def quantile(share: float, metric: str, where: str, by: str = "") -> str:
    """Of the times of a histogram, without its `_bucket`."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', where, labels)})"


def mean(metric: str, where: str, by: str = "") -> str:
    """Of the times of a histogram."""
    return f"{rate(f'{metric}_sum', where, by)} / {rate(f'{metric}_count', where, by)}"


def within(metric: str, bound: str, where: str, by: str = "") -> str:
    """Which share of the times of a histogram was no longer than one of its bounds."""
    below = f'{where},le="{bound}"'
    return f"{rate(f'{metric}_bucket', below, by)} / {rate(f'{metric}_count', where, by)}"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
