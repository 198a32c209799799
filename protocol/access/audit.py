"""The audit log's records: who did what, and how it went, without any text of requests. Pure."""

from typing import Any, Literal, get_args

import msgspec

from tokenbus.protocol.wire import subjects

AuditKind = Literal["request", "key", "connection", "control"]
KINDS: tuple[AuditKind, ...] = get_args(AuditKind)
MAX_TEXT_CHARS = 256
"""Longer values in a record are cut."""
_MAX_LISTED = 16
_NO_TENANT = "="
"""Stands for acts that concern no tenant: no name has this token."""
_KEY_INBOX = "_INBOX_key"
_KEY_INBOX_TOKENS = 3


class AuditRecord(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One act."""

    at: float
    """Unix time, by the clock of the process that writes it."""
    kind: AuditKind
    what: str
    """The operation of a request, the change of a key, what became of a connection, the command to a worker."""
    tenant: str = ""
    """Empty if it concerns no tenant."""
    actor: str = ""
    """The id of a key, the inbox prefix of an operator, or the user and host of who changes keys; empty for requests
    without a key."""
    fields: dict[str, Any] = {}
    """Further facts, by name."""


_records = msgspec.json.Decoder(AuditRecord)


def record(at: float, kind: AuditKind, what: str, tenant: str = "", actor: str = "", **fields: object) -> AuditRecord:
    """Returns a record of bounded size, without the fields that say nothing."""
    said = {name: _bounded(value) for name, value in fields.items() if value not in (None, "", (), [])}
    return AuditRecord(at=at, kind=kind, what=_cut(what), tenant=tenant, actor=_cut(actor), fields=said)


def encode(one: AuditRecord) -> bytes:
    return msgspec.json.encode(one)


def decode(payload: bytes) -> AuditRecord:
    """Reverses `encode`. Raises ValueError."""
    return _records.decode(payload)


def key_of(one: AuditRecord) -> str:
    """Returns the end of a record's subject: `<tenant>.<kind>`."""
    return f"{subjects.encode_name(one.tenant) if one.tenant else _NO_TENANT}.{one.kind}"


def pattern_of(tenant: str | None = None, kind: AuditKind | None = None) -> str:
    """Returns the pattern of the ends of subjects; None stands for all."""
    return f"{'*' if tenant is None else subjects.encode_name(tenant)}.{kind or '*'}"


def actor_of_inbox(reply: str) -> tuple[str, str]:
    """Returns the tenant and the name of whoever is answered on a reply subject, as the broker's permissions bind it:
    the id of a key, or the first token, with no tenant."""
    tokens = reply.split(".", _KEY_INBOX_TOKENS)
    if tokens[0] == _KEY_INBOX and len(tokens) > _KEY_INBOX_TOKENS:
        try:
            return subjects.decode_name(tokens[1]), subjects.decode_name(tokens[2])
        except ValueError:
            pass
    return "", tokens[0]


def _bounded(value: object) -> object:
    if isinstance(value, str):
        return _cut(value)
    if isinstance(value, (list, tuple)):
        return [_bounded(one) for one in value[:_MAX_LISTED]]
    return value


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 1]}…"
