"""From a key's record to the rights of its connections, and the name by which the broker knows these."""

import functools
import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tokenbus.protocol.access import keys
from tokenbus.protocol.access.keys import KeyRecord, Role
from tokenbus.protocol.wire import subjects

_ASKING = ("generate", "embed", "rerank", "tokenize", "detokenize", "cache")
_LOOKING = ("models", "fleet", "trace")
_ABOUT_REQUESTS = ("cancel", "resync")
_WILD = frozenset("*?[")
_MARK_CHARS = 12
_MAX_GRANTS = 8_192
"""Grants that are remembered: a client that reconnects, and each look at its connection, ask for the same."""
_USER = re.compile(rf"([a-z2-7]{{10}})-[0-9a-f]{{{_MARK_CHARS}}}")


class Grant(NamedTuple):
    """The rights of connections that were made with one secret of a key."""

    user: str
    """The name of these connections' user: the key's id and a digest of everything below and of the secret's. So who
    lists the connections sees which ones have other rights than their key has now."""
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    valid_until: float | None
    """Unix time at which the key, or this secret, ends."""


@functools.lru_cache(_MAX_GRANTS)
def grant_of(record: KeyRecord, digest: str, prefix: str) -> Grant:
    """Returns the rights of connections with the secret that has this digest; `prefix` is that of all subjects."""
    tenant, key_id = subjects.encode_name(record.tenant), record.id
    publish = tuple(f"{prefix}.{subject}" for subject in _published(record, tenant))
    subscribe = [f"{keys.inbox_prefix(record.tenant, key_id)}.>"]
    if record.role is Role.OPERATOR:
        subscribe.append(f"{prefix}.card.>")
    ends = [at for at in (record.expires_at, record.revoked_at) if at is not None]
    if record.old_secret is not None and digest == record.old_secret.hash != record.hash:
        ends.append(record.old_secret.valid_until)
    valid_until = min(ends, default=None)
    mark = hashlib.sha256(msgspec.json.encode((digest, publish, subscribe, valid_until))).hexdigest()[:_MARK_CHARS]
    return Grant(f"{key_id}-{mark}", publish, tuple(subscribe), valid_until)


def all_users_of(record: KeyRecord | None, prefix: str) -> frozenset[str]:
    """Returns the users that a key, or its old secret, may ever have had; none without a record."""
    return frozenset(grant.user for grant in _grants_of(record, prefix))


def users_of(record: KeyRecord | None, prefix: str, now: float) -> frozenset[str]:
    """Returns the users that a key may have connections of at a Unix time; none without a record."""
    if record is None or not record.is_valid_at(now):
        return frozenset()
    return frozenset(one.user for one in _grants_of(record, prefix) if one.valid_until is None or now < one.valid_until)


def _grants_of(record: KeyRecord | None, prefix: str) -> list[Grant]:
    if record is None:
        return []
    digests = [record.hash, *([record.old_secret.hash] if record.old_secret is not None else [])]
    return [grant_of(record, digest, prefix) for digest in digests]


def key_id_of(user: str) -> str | None:
    """Returns the id of the key that a user belongs to, or None for one that no key has made."""
    found = _USER.fullmatch(user)
    return found[1] if found else None


def _published(record: KeyRecord, tenant: str) -> Iterator[str]:
    """Yields the subjects that a key may publish to, without their prefix."""
    yield from (f"{verb}.{tenant}.{record.id}" for verb in _LOOKING)
    if record.role is Role.VIEWER:
        return
    for model in _model_tokens(record.models):
        yield from (f"{verb}.{model}.{tenant}.{record.id}" for verb in _ASKING)
    for verb in _ABOUT_REQUESTS:
        yield f"{verb}.{tenant}.>"
        if record.tenant == subjects.DEFAULT_TENANT:
            yield f"{verb}.*"
    yield f"upload.{tenant}.>"
    if record.role is Role.OPERATOR:
        yield from ("worker.*.*.control", "discover")


def _model_tokens(patterns: tuple[str, ...]) -> list[str]:
    """Returns the models as subject tokens. A pattern that only stands for some names can't be one: routers refuse the
    others."""
    if any(_WILD & set(pattern) for pattern in patterns):
        return ["*"]
    return sorted({subjects.encode_name(pattern) for pattern in patterns})
