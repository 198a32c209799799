"""What the values of flags may be: each makes one of its text, and says in a line why it can't."""

import argparse
from collections.abc import Callable

from tokenbus.router.requests.rate_limiter import TenantLimits


def port(text: str) -> int:
    """0 takes a free one."""
    value = int(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, got {value}")
    return value


def at_least(low: int) -> Callable[[str], int]:
    """Whole numbers from that on."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
        return value

    parse.__name__ = "number"
    return parse


def seconds(text: str) -> float:
    """How often to look."""
    value = float(text)
    if not 0.05 <= value <= 3_600:
        raise argparse.ArgumentTypeError(f"must be 0.05 to 3600 seconds, got {text}")
    return value


def one_of(*names: str) -> Callable[[str], str]:
    """One of these words."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, got {text}")
        return text

    return parse


def tenant_limits(text: str) -> TenantLimits:
    """Of a tenant, `8,600,100000`."""
    try:
        concurrency, requests, tokens = text.split(",")
        found = TenantLimits(int(concurrency), float(requests), float(tokens))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be three numbers as 8,600,100000, got {text}") from None
    if not all(0 <= number < float("inf") for number in found):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return found


def tenant_limit_for(text: str) -> tuple[str, TenantLimits]:
    """A tenant and its limits, `acme=8,600,100000`."""
    tenant, _, rest = text.partition("=")
    if not tenant or not rest:
        raise argparse.ArgumentTypeError(f"must be a tenant and its limits as acme=8,600,100000, got {text}")
    return tenant, tenant_limits(rest)


def ports(text: str) -> range:
    """One, or the first and last of several."""
    first, _, last = text.partition("-")
    found = range(port(first), port(last or first) + 1)
    if not found:
        raise argparse.ArgumentTypeError(f"must be a port, or the first and last of several, got {text}")
    return found
