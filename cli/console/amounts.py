"""Amounts as operators read them: bytes, times, and workers by their states."""

from tokenbus.protocol.wire import messages


def size_text(num_bytes: int) -> str:
    """Returns a number of bytes in a suitable unit, such as `1.5G`."""
    gib = num_bytes / 2**30
    return f"{gib:.1f}G" if gib >= 1 else f"{num_bytes / 2**20:.0f}M"


def duration_text(seconds: float) -> str:
    """Returns a time in its two largest units, such as `3d 4h`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"


def counts_text(counts: messages.WorkerCounts) -> str:
    """Describes how many workers are in which state."""
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(counts.states.items()))
    return f"{counts.workers:,} {'worker' if counts.workers == 1 else 'workers'}: {states}"
