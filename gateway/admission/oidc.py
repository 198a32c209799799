"""Tells callers by the tokens of an OpenID Connect issuer, whose public keys are fetched and kept for an hour."""

import asyncio
import hashlib
import json
import time
import urllib.request
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Mapping
from http.client import HTTPException
from typing import Any, NoReturn

import jwt
import structlog

from tokenbus.gateway.admission.callers import Caller
from tokenbus.gateway.admission.settings import OidcSettings, check_issuer_url
from tokenbus.protocol import tasks
from tokenbus.protocol.access.key_ring import KeyProblem, KeyRefusedError
from tokenbus.protocol.access.keys import Role
from tokenbus.protocol.wire import subjects

_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Only those with a public key: with a shared one, whoever knows the public key could sign."""
_LEEWAY_S = 30.0
"""Clocks may differ by so much."""
_RENEWED_S = 1_800.0
"""Keys as old as this are fetched again while they are used."""
_KEPT_S = 3_600.0
"""Keys as old as this, which no token has needed for a while, are fetched again before they are used."""
_STALE_S = 86_400.0
"""Keys are used for so long while the issuer can't be reached."""
_LEAST_INTERVAL_S = 10.0
"""The issuer is not asked more often, however many tokens name unknown keys."""
_TIMEOUT_S = 5.0
"""The time for an answer, and for each step on the way to one."""
_MAX_WAITING = 64
_MAX_WAITING_OF_ADDRESS = 16
"""Tokens with unknown keys that wait for the issuer, in all and from one address; others are refused at once. Tokens
with known keys don't wait."""
_MAX_BYTES = 1024 * 1024
_PIECE_BYTES = 64 * 1024
_MAX_KEYS = 64
_MAX_SUBJECT_CHARS = 64
_FAILURES = (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Ways in which an issuer can't be reached, or its answer can't be read."""
_BY_POWER = (Role.OPERATOR, Role.USER, Role.VIEWER)


class OidcTokens:
    """Checks tokens. One that is accepted has a tenant and a role, and no key's id."""

    def __init__(
        self,
        settings: OidcSettings,
        default_tenant: str,
        fetch: Callable[[str], Awaitable[bytes]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fetch` returns what is at a URL, and raises OSError, ValueError or HTTPException."""
        self._settings = settings
        self._default_tenant = default_tenant
        self._fetch = fetch or _fetch
        self._clock = clock
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at = self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._is_away = False
        """Whether the issuer was asked in vain the last time."""
        self._waiting: Tally[str] = Tally()
        """The number of tokens that wait for the issuer, by address."""

    def __repr__(self) -> str:
        return f"<OidcTokens of {self._settings.issuer}, {len(self._keys)} keys>"

    async def caller_of(self, token: str, address: str = "") -> Caller:
        """Returns who a token stands for that comes from an address. Raises KeyRefusedError."""
        try:
            kid = str(jwt.get_unverified_header(token).get("kid", ""))
        except jwt.PyJWTError as error:
            raise KeyRefusedError(KeyProblem.INVALID, "the token can't be read") from error
        key = await self._key(kid, address)
        try:
            claims = jwt.decode(
                token,
                key.key,
                _ALGORITHMS,
                {"require": ["exp", "iss", "aud"]},
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                leeway=_LEEWAY_S,
            )
        except (jwt.InvalidSignatureError, jwt.InvalidKeyError, jwt.InvalidAlgorithmError, TypeError) as error:
            raise KeyRefusedError(KeyProblem.INVALID, "the token's signature is wrong") from error
        except (jwt.PyJWTError, ValueError) as error:
            _refuse(str(error))
        return Caller(self._tenant_of(claims), role=self._role_of(claims), actor=_actor_of(claims))

    def _tenant_of(self, claims: Mapping[str, Any]) -> str:
        claim = self._settings.tenant_claim
        tenant = _claim(claims, claim) if claim else self._default_tenant
        try:
            subjects.encode_name(tenant if isinstance(tenant, str) else "")
        except ValueError:
            _refuse(f"the claim {claim} names no tenant")
        return str(tenant)

    def _role_of(self, claims: Mapping[str, Any]) -> Role:
        claim = self._settings.role_claim
        if not claim:
            return Role.USER
        found = _claim(claims, claim)
        named = found if isinstance(found, list) else [found]
        roles = [role for role in _BY_POWER if str(role) in named]
        if not roles:
            _refuse(f"the claim {claim} names no role: {', '.join(Role)}")
        return roles[0]

    async def _key(self, kid: str, address: str) -> jwt.PyJWK:
        """Returns a public key of the issuer. Raises KeyRefusedError."""
        age_s = self._clock() - self._fetched_at
        if kid not in self._keys or age_s >= _STALE_S:
            await self._wait_for_keys(address)
        elif age_s >= _RENEWED_S:
            was_asking, asking = self._asking, self._ask_soon()
            # after a long silence: the key may be withdrawn, and the issuer was there when it was last asked
            if asking is not None and was_asking is None and age_s >= _KEPT_S and not self._is_away:
                await asyncio.shield(asking)
        if self._clock() - self._fetched_at >= _STALE_S:
            raise KeyRefusedError(KeyProblem.UNAVAILABLE, "the issuer of tokens can't be reached now: try again later")
        if kid not in self._keys:
            raise KeyRefusedError(KeyProblem.INVALID, "the token is signed with an unknown key")
        return self._keys[kid]

    async def _wait_for_keys(self, address: str) -> None:
        """Waits until the issuer has been asked, if that is due. Raises KeyRefusedError if too many wait already."""
        asking = self._ask_soon()
        if asking is None:
            return
        if self._waiting.total() >= _MAX_WAITING or self._waiting[address] >= _MAX_WAITING_OF_ADDRESS:
            raise KeyRefusedError(
                KeyProblem.UNAVAILABLE, "too many tokens with unknown keys wait for their issuer: try again later"
            )
        self._waiting[address] += 1
        try:
            await asyncio.shield(asking)
        finally:
            self._waiting[address] -= 1
            self._waiting += Tally()  # without addresses of which none waits

    def _ask_soon(self) -> asyncio.Task[None] | None:
        """Returns the task that asks the issuer, which is started if that is due; None if it was asked just now."""
        if self._asking is None and self._clock() - self._asked_at >= _LEAST_INTERVAL_S:
            self._asking = tasks.background("ask the issuer of tokens", self._ask())
        return self._asking

    async def _ask(self) -> None:
        """Fetches the issuer's keys; keeps the ones before if that fails."""
        issuer = self._settings.issuer
        try:
            found = json.loads(await self._fetch(f"{issuer.rstrip('/')}/.well-known/openid-configuration"))
            if found["issuer"] != issuer:
                raise ValueError(f"it says that it is {str(found['issuer'])[:100]}")
            check_issuer_url(found["jwks_uri"])
            entries = json.loads(await self._fetch(found["jwks_uri"]))["keys"]
            self._keys = _read_keys(entries[:_MAX_KEYS])
            self._fetched_at = self._clock()
            self._is_away = False
        except _FAILURES as error:
            self._is_away = True
            structlog.get_logger().warning("issuer_unreachable", url=issuer, error=f"{type(error).__name__}: {error}")
        finally:
            self._asked_at, self._asking = self._clock(), None


def _read_keys(entries: list[dict[str, Any]]) -> dict[str, jwt.PyJWK]:
    """Returns the public keys for signatures by their ids, without those that are malformed or of an unknown kind.
    Raises ValueError if no others are there."""
    keys = {}
    for entry in entries:
        try:
            if entry.get("use", "sig") == "sig" and entry.get("kty") in ("RSA", "EC", "OKP"):
                keys[str(entry.get("kid", ""))] = jwt.PyJWK.from_dict(entry)
        except (jwt.PyJWTError, ValueError, TypeError, AttributeError):
            continue
    if entries and not keys:
        raise ValueError("none of its keys can be used")
    return keys


def _actor_of(claims: Mapping[str, Any]) -> str:
    """Returns the issuer's name for someone, or a digest of one that is long or moves a cursor."""
    subject = str(claims.get("sub", ""))
    if len(subject) <= _MAX_SUBJECT_CHARS and subject.isprintable():
        return f"oidc:{subject}"
    return f"oidc:sha256-{hashlib.sha256(subject.encode(errors='surrogatepass')).hexdigest()[:32]}"


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """Returns a claim; dots lead into objects, as in `realm_access.roles`, unless a claim has the whole name."""
    if path in claims:
        return claims[path]
    found: Any = claims
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _refuse(problem: str) -> NoReturn:
    raise KeyRefusedError(KeyProblem.NOT_VALID_NOW, f"the token is not valid here: {problem}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


async def _fetch(url: str) -> bytes:
    def read() -> bytes:
        content, until = bytearray(), time.monotonic() + _TIMEOUT_S
        with _opener.open(url, timeout=_TIMEOUT_S) as response:
            while part := response.read1(_PIECE_BYTES):
                content += part
                if len(content) > _MAX_BYTES:
                    raise ValueError(f"its answer has more than {_MAX_BYTES} bytes")
                if time.monotonic() > until:  # or the thread would be taken for as long as a byte comes now and then
                    raise TimeoutError("its answer takes too long")
        return bytes(content)

    async with asyncio.timeout(2 * _TIMEOUT_S):
        return await asyncio.to_thread(read)
