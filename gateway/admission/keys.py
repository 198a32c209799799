"""API keys and their tenants. Only digests of keys are kept, so that a key can't be shown by accident."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from tokenbus.protocol.wire import subjects

VARIABLE = "TOKENBUS_API_KEYS"
_SCHEME = "bearer "
_KEY_HEADERS = ("x-api-key", "api-key")


class ApiKeys:
    """The API keys of a gateway. Without any, anyone may send requests, for one tenant."""

    def __init__(self, pairs: Iterable[str], anonymous_tenant: str = subjects.DEFAULT_TENANT) -> None:
        """`pairs` are `key=tenant`, or keys alone, for `anonymous_tenant`. Raises ValueError for anything else, without
        showing it: it may contain a key."""
        self._digests = [_parse(pair, number, anonymous_tenant) for number, pair in enumerate(pairs, 1)]
        self._anonymous_tenant = anonymous_tenant

    def __repr__(self) -> str:
        return f"<ApiKeys of {len(self._digests)}>"

    @property
    def allows_anonymous(self) -> bool:
        """Whether requests need no key."""
        return not self._digests

    @property
    def tenants(self) -> set[str]:
        """All tenants that may make requests."""
        return {tenant for _, tenant in self._digests} or {self._anonymous_tenant}

    def tenant_of(self, headers: Mapping[str, str]) -> str | None:
        """Returns the tenant of a request with these headers, decoded as Latin-1, or None if its key is unknown.

        Takes constant time, so that a key can't be guessed byte by byte."""
        if not self._digests:
            return self._anonymous_tenant
        key = key_in(headers)
        if key is None:
            return None
        asked, found = _digest(key.encode("latin-1")), None
        for digest, tenant in self._digests:  # no early exit, which would reveal the position of a key
            if hmac.compare_digest(digest, asked):
                found = tenant
        return found


def key_in(headers: Mapping[str, str]) -> str | None:
    """Returns the key in a request's headers: that of `Authorization` (with `Bearer`), `x-api-key` or `api-key`, the
    first one in this order."""
    authorization = headers.get("authorization", "")
    if authorization.lower().startswith(_SCHEME):
        return authorization[len(_SCHEME) :].strip()
    given = [headers[name] for name in _KEY_HEADERS if name in headers]
    return given[0].strip() if given else None


def _parse(pair: str, number: int, default_tenant: str) -> tuple[bytes, str]:
    key, equals, tenant = pair.strip().rpartition("=")
    if not equals:
        key, tenant = tenant, default_tenant
    try:
        subjects.encode_name(tenant)
    except ValueError as error:
        raise ValueError(f"API key {number}: must be key=tenant or a key; {error}") from error
    if not key:
        raise ValueError(f"API key {number}: must be key=tenant or a key")
    return _digest(key.encode(errors="surrogateescape")), tenant


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
