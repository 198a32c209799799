"""API keys, and the tenants whose they are; pure. A key itself is not kept, and never shown."""

import hashlib
import hmac
from collections.abc import Iterable

from tokenbus.protocol.wire import subjects

VARIABLE = "TOKENBUS_API_KEYS"
_SCHEME = "bearer "


class ApiKeys:
    """Who may ask, and on whose behalf. Without keys everybody may, for one tenant."""

    def __init__(self, pairs: Iterable[str], anonymous_tenant: str = subjects.DEFAULT_TENANT) -> None:
        """`pairs` are `key=tenant`. Raises ValueError for what is no such pair, without saying what it was."""
        self._digests = [_parse(pair, number) for number, pair in enumerate(pairs, 1)]
        self._anonymous_tenant = anonymous_tenant

    def __repr__(self) -> str:
        return f"<Keys of {len(self._digests)}>"

    @property
    def allows_anonymous(self) -> bool:
        """Whether everybody may ask."""
        return not self._digests

    @property
    def tenants(self) -> set[str]:
        """All on whose behalf may be asked."""
        return {tenant for _, tenant in self._digests} or {self._anonymous_tenant}

    def tenant_of(self, authorization: str) -> str | None:
        """Whose the key of an `Authorization` header is, decoded as Latin-1; None for none of ours.

        Takes as long for a wrong key as for a right one, wherever it differs."""
        if not self._digests:
            return self._anonymous_tenant
        if not authorization.lower().startswith(_SCHEME):
            return None
        asked, found = _digest(authorization[len(_SCHEME) :].strip().encode("latin-1")), None
        for digest, tenant in self._digests:
            if hmac.compare_digest(digest, asked):
                found = tenant
        return found


def _parse(pair: str, number: int) -> tuple[bytes, str]:
    key, _, tenant = pair.strip().rpartition("=")
    try:
        subjects.encode_name(tenant)
    except ValueError as error:
        raise ValueError(f"API key {number}: must be key=tenant; {error}") from error
    if not key:
        raise ValueError(f"API key {number}: must be key=tenant")
    return _digest(key.encode(errors="surrogateescape")), tenant


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
