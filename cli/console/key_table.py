"""Shows keys to people and to programs, without the digests of their secrets."""

from collections.abc import Iterable

from tokenbus.cli.console import text_table
from tokenbus.cli.console.moments import text_of_moment
from tokenbus.cli.console.plain_text import printable
from tokenbus.protocol.access.keys import KeyLimits, KeyRecord

_HEAD = ("id", "tenant", "name", "role", "models", "limits", "expires", "state")
_LIMITS = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "tokens_per_day": "tokens/day",
    "concurrency": "open",
    "max_tokens": "max_tokens",
    "connections": "connections",
}


def table(records: Iterable[KeyRecord], now: float) -> str:
    """Returns a table with a line for each key, by tenant and name."""
    ordered = sorted(records, key=lambda one: (one.tenant, one.name, one.id))
    rows = [_HEAD, *(_row(record, now) for record in ordered)]
    return text_table.text_of(rows)


def details(record: KeyRecord, now: float) -> str:
    """Returns everything about one key, a line for each field."""
    old = record.old_secret
    lines = {
        "id": record.id,
        "state": str(record.state_at(now)),
        "tenant": printable(record.tenant),
        "name": printable(record.name),
        "role": str(record.role),
        "models": _models(record),
        "limits": _limits(record.limits),
        "least priority": str(record.max_priority),
        "created": f"{text_of_moment(record.created_at)}{record.created_by and f' by {printable(record.created_by)}'}",
        "not before": text_of_moment(record.not_before) if record.not_before else "",
        "expires": text_of_moment(record.expires_at) if record.expires_at is not None else "never",
        "revoked": text_of_moment(record.revoked_at) if record.revoked_at is not None else "",
        "old secret": f"valid until {text_of_moment(old.valid_until)}" if old and now < old.valid_until else "",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items() if text)


def _row(record: KeyRecord, now: float) -> tuple[str, ...]:
    expires = text_of_moment(record.expires_at) if record.expires_at is not None else "-"
    return (
        record.id,
        printable(record.tenant),
        printable(record.name) or "-",
        str(record.role),
        _models(record),
        _limits(record.limits),
        expires,
        str(record.state_at(now)),
    )


def _models(record: KeyRecord) -> str:
    return printable(",".join(record.models))


def _limits(limits: KeyLimits) -> str:
    set_ones = [f"{getattr(limits, name):,} {text}" for name, text in _LIMITS.items() if getattr(limits, name)]
    return ", ".join(set_ones) or "-"
