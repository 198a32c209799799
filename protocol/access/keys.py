"""API keys and their records.

A key is `tb_ID_SECRET`. The id names it in commands, logs, subjects and usage; the secret is shown once, when the key
is made. A record holds the SHA-256 digest of the whole key. A secret has 256 random bits, so that no slow hash is
needed, and a secret under another key's id has another digest."""

import base64
import enum
import fnmatch
import hashlib
import hmac
import re
import secrets
from typing import Annotated, Any, NamedTuple

import msgspec

from tokenbus.protocol.wire import limits, subjects

PREFIX = "tb_"
ID_CHARS = 10
MAX_RECORD_BYTES = 16 * 1024
VERSION = 1

_SECRET_BYTES = 32
_KEY = re.compile(r"tb_([a-z2-7]{10})_([A-Za-z0-9_-]{43})")
_ID = re.compile(r"[a-z2-7]{10}")
_NOT_SHOWN = ("v", "hash", "limits", "old_secret")
_MAX_COUNT = 2**53 - 1
"""The largest whole number that every JSON reader keeps exact."""

Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Moment = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]
"""Unix time in seconds, until the year 9999."""


class Role(enum.StrEnum):
    """The rights of a key's holder."""

    USER = "user"
    """Make requests, and read their usage."""
    VIEWER = "viewer"
    """Look at the fleet and at its tenant's usage, and make no requests."""
    OPERATOR = "operator"
    """All of this for all tenants, and load, unload, drain and stop."""


class KeyState(enum.StrEnum):
    """Whether a key may be used, as it is shown to people."""

    VALID = "valid"
    NOT_YET = "not yet valid"
    EXPIRED = "expired"
    REVOKED = "revoked"


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one key, or of a tenant; 0 means that there is none.

    A limit that this version does not know makes the record invalid: ignoring it would allow more than was meant."""

    requests_per_minute: Count = 0
    tokens_per_minute: Count = 0
    """Prompt and completion tokens."""
    tokens_per_day: Count = 0
    """Prompt and completion tokens between two midnights of UTC."""
    concurrency: Count = 0
    """Requests open at the same time."""
    max_tokens: Count = 0
    """The largest `max_tokens` of a request; one that asks for none gets at most this."""
    connections: Count = 0
    """Connections to the brokers at the same time, where clients show keys there."""


class OldSecret(msgspec.Struct, frozen=True):
    """A secret that a rotation has replaced."""

    hash: Digest
    valid_until: Moment


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that is known of a key, which does not include its secret. Times are Unix times in seconds."""

    v: Annotated[int, msgspec.Meta(ge=1)] = VERSION
    id: str
    hash: Digest
    tenant: str
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """The name that its owner gave it."""
    role: Role = Role.USER
    models: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ("*",)
    """Patterns (`*`, `?`, `[...]`) of the models that it may use, adapters included."""
    limits: KeyLimits = KeyLimits()
    max_priority: Annotated[int, msgspec.Meta(ge=-1_000, le=1_000)] = 0
    """The highest `priority` of a request."""
    created_at: Moment = 0.0
    created_by: Annotated[str, msgspec.Meta(max_length=200)] = ""
    not_before: Moment = 0.0
    expires_at: Moment | None = None
    revoked_at: Moment | None = None
    old_secret: OldSecret | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an id, tenant or pattern that no key can have."""
        if not is_key_id(self.id):
            raise ValueError(f"id must be {ID_CHARS} of a-z and 2-7, got {self.id[:50]!r}")
        try:
            subjects.encode_name(self.tenant)
        except ValueError as error:
            raise ValueError(f"tenant: {error}") from error
        if not self.models or any(not 0 < len(one.encode()) <= limits.MAX_NAME_BYTES for one in self.models):
            raise ValueError(f"models must be patterns of 1 to {limits.MAX_NAME_BYTES} bytes")

    def allows_model(self, model: str) -> bool:
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)

    def is_valid_at(self, now: float) -> bool:
        """Whether it may be used at a Unix time."""
        return self.problem_at(now) is None

    def state_at(self, now: float) -> KeyState:
        """Returns the state of the key at a Unix time."""
        if self.revoked_at is not None:
            return KeyState.REVOKED
        if self.expires_at is not None and now >= self.expires_at:
            return KeyState.EXPIRED
        return KeyState.NOT_YET if now < self.not_before else KeyState.VALID

    def shown(self, now: float) -> dict[str, Any]:
        """Returns the key for JSON, without digests of secrets; times are Unix times in seconds."""
        old = self.old_secret
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in _NOT_SHOWN} | {
            "limits": {name: getattr(self.limits, name) for name in KeyLimits.__struct_fields__},
            "old_secret_valid_until": old.valid_until if old else None,
            "state": self.state_at(now),
        }

    def problem_at(self, now: float) -> str | None:
        """Returns what is wrong with the key at a Unix time, as the end of a sentence about it, or None."""
        if self.revoked_at is not None:  # by any clock: the one that wrote it may be ahead of this one
            return "has been revoked"
        if self.expires_at is not None and now >= self.expires_at:
            return "has expired"
        return "is not valid yet" if now < self.not_before else None

    def has_secret(self, key: str, now: float) -> bool:
        """Whether this is the record of a whole key, in constant time."""
        asked = digest_of(key)
        is_current = hmac.compare_digest(asked, self.hash)
        old = self.old_secret
        is_old = old is not None and hmac.compare_digest(asked, old.hash) and now < old.valid_until
        return is_current or is_old


class NewKey(NamedTuple):
    """A key that has just been made: the only time that its secret is known."""

    text: str
    id: str
    hash: str


def new_key(key_id: str = "") -> NewKey:
    """Makes a key, or another secret for an id."""
    key_id = key_id or base64.b32encode(secrets.token_bytes(7)).decode().lower()[:ID_CHARS]
    text = f"{PREFIX}{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return NewKey(text, key_id, digest_of(text))


def digest_of(key: str) -> str:
    """Returns the hexadecimal SHA-256 digest under which a key is known."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def id_of(key: str) -> str | None:
    """Returns the id in a key, or None for a text that is not of a key's form."""
    found = _KEY.fullmatch(key)
    return found[1] if found else None


def inbox_prefix(tenant: str, key_id: str) -> str:
    """Returns the first tokens of the reply subjects of clients that show a key to the broker."""
    return f"_INBOX_key.{subjects.encode_name(tenant)}.{key_id}"


def is_key_id(text: str) -> bool:
    return bool(_ID.fullmatch(text))


def encode_record(record: KeyRecord) -> bytes:
    return msgspec.json.encode(record)


_records = msgspec.json.Decoder(KeyRecord)


def decode_record(payload: bytes) -> KeyRecord:
    """Decodes a record; fields of later versions are ignored. Raises ValueError, which shows no digest."""
    if len(payload) > MAX_RECORD_BYTES:
        raise ValueError(f"a key's record has at most {MAX_RECORD_BYTES} bytes, this one {len(payload)}")
    return _records.decode(payload)
