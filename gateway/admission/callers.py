"""Finds out who sends a request, by its API key, and counts and logs those who may not."""

import ipaddress
import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

import structlog
from starlette.requests import Request

from tokenbus.gateway.admission.keys import ApiKeys, key_in
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ApiError
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.audit_log import AuditWriter
from tokenbus.protocol.access.key_ring import KeyProblem, KeyRefusedError, KeyRing
from tokenbus.protocol.access.keys import Role
from tokenbus.protocol.access.refusal_records import RefusalRecords
from tokenbus.protocol.http.connection_table import client_address

_LOG_INTERVAL_S = 10.0
_FORBIDDEN = "forbidden"
_DOTS_OF_TOKEN = 2
_MAX_TENANTS_OF_TOKENS = 4_096
"""Tenants that are remembered because a token has named them."""
_NOT_PUBLIC = ("localhost", "local", "internal", "home.arpa")
"""Under these, strangers can't have a name."""


class Caller(NamedTuple):
    """Who sends a request, and what they may do here. Routers check the rest: models, limits, priority."""

    tenant: str
    key_id: str = ""
    """Empty for one that has no key of the fleet."""
    role: Role = Role.USER
    models: tuple[str, ...] = ("*",)
    """Patterns of the models that are listed for them."""
    actor: str = ""
    """Who they are, where a token and not a key says so, for this gateway's log and traces."""

    @property
    def is_operator(self) -> bool:
        """Whether they see all tenants. To command workers and change keys they also need a key, by which it is known
        who did."""
        return self.role is Role.OPERATOR


class Tokens(Protocol):
    """Tokens that stand for callers, in place of keys."""

    async def caller_of(self, token: str, address: str) -> Caller:
        """Returns who a token stands for that comes from an address. Raises KeyRefusedError."""
        ...


class Callers:
    """Tells callers by the gateway's own keys, by those of the fleet, and by tokens."""

    def __init__(
        self,
        api_keys: ApiKeys,
        ring: KeyRing | None,
        measured: GatewayMetrics,
        tokens: Tokens | None = None,
        audit: AuditWriter | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ring` is None if the fleet has no keys; `now` is Unix time, `clock` monotonic."""
        self.api_keys = api_keys
        self.ring = ring
        self._metrics = measured
        self._tokens = tokens
        self._now = now
        self._clock = clock
        self._of_tokens: set[str] = set()
        self.on_tenant: Callable[[], None] = lambda: None
        """Called for each tenant that a token names for the first time."""
        self._unlogged: Tally[str] = Tally()
        self._logged_at: dict[str, float] = {}
        self._records = None if audit is None else RefusalRecords(audit)

    def __repr__(self) -> str:
        return f"<Callers {self.api_keys!r} {self.ring!r}>"

    @property
    def _has_others(self) -> bool:
        """Whether there are other ways to be known than by the gateway's own keys."""
        return self.ring is not None or self._tokens is not None

    @property
    def allows_anonymous(self) -> bool:
        """Whether requests need no key."""
        return not self._has_others and self.api_keys.allows_anonymous

    @property
    def tenants(self) -> set[str]:
        """The tenants of all keys, and of the tokens so far."""
        known = self._of_tokens if self.ring is None else self._of_tokens | {record.tenant for record in self.ring}
        return set(known) if known and self.api_keys.allows_anonymous else known | self.api_keys.tenants

    async def sender_of(self, request: Request) -> Caller:
        """Returns the sender of a request. Raises ApiError."""
        host = request.client.host if request.client else ""
        return await self.identify(request.headers, client_address(host))

    async def identify(self, headers: Mapping[str, str], address: str = "") -> Caller:
        """Returns the sender of a request with these headers, decoded as Latin-1, that comes from an address. Raises
        ApiError."""
        if not self._has_others or not self.api_keys.allows_anonymous:
            tenant = self.api_keys.tenant_of(headers)
            if tenant is not None:
                return Caller(tenant)
        key = key_in(headers)
        try:
            if key is not None and self._tokens is not None and key.count(".") == _DOTS_OF_TOKEN:
                caller = await self._tokens.caller_of(key, address)
                self._note_tenant(caller.tenant)
                return caller
            if key is None or self.ring is None:
                raise self._refused(KeyProblem.INVALID, None, http_errors.INVALID_API_KEY)
            record = self.ring.find(key, self._now(), self._clock())
        except KeyRefusedError as error:
            raise self._refused(error.problem, keys.id_of(key or ""), http_errors.key_refused(error)) from error
        return Caller(record.tenant, record.id, record.role, record.models)

    def _note_tenant(self, tenant: str) -> None:
        if tenant not in self._of_tokens and len(self._of_tokens) < _MAX_TENANTS_OF_TOKENS:
            self._of_tokens.add(tenant)
            self.on_tenant()

    def check_requests(self, caller: Caller) -> None:
        """Raises ApiError for one who may look at the fleet and not use it."""
        if caller.role is Role.VIEWER:
            raise self._refused(_FORBIDDEN, caller.key_id, http_errors.VIEWER)

    def check_host(
        self, headers: Mapping[str, str], allowed_origins: Collection[str], *, is_on_network: bool = False
    ) -> None:
        """Raises ApiError, where no key is needed, for a request to a public name that is not one of these origins, nor
        sent by a page of one.

        Strangers can point a name of theirs here once a reader has loaded their page from it (DNS rebinding). The
        browser then takes the gateway for that page's own server, and says so in no other header when it only reads.
        An address that `is_on_network` may have a public name, which programs use: there only pages are refused."""
        if not self.allows_anonymous:
            return
        host, origin = _name_in(headers.get("host", "")), headers.get("origin", "")
        own = {_name_in(one.partition("://")[2]) for one in allowed_origins}
        if not _may_be_strangers(host) or host in own or {origin, "*"} & set(allowed_origins):
            return
        if not is_on_network or _name_in(origin.partition("://")[2]) == host:
            raise self._refused(_FORBIDDEN, None, http_errors.strange_host(host))

    def update_gauges(self) -> None:
        if self.ring is not None:
            self._metrics.keys.set(len(self.ring))
            self._metrics.keys_silent.set(self.ring.silent_s(self._clock()))

    def _refused(self, reason: str, key_id: str | None, response: http_errors.ErrorResponse) -> ApiError:
        """Counts a refusal. Not every one is logged, since strangers can send thousands of keys."""
        self._metrics.keys_refused.labels(reason).inc()
        self._unlogged[reason] += 1
        clock = self._clock()
        is_due = clock - self._logged_at.get(reason, -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S
        if is_due and self._has_others:
            self._logged_at[reason] = clock
            count = self._unlogged.pop(reason)
            structlog.get_logger().warning("keys_refused", reason=reason, key_id=key_id, count=count)
        if self._records is not None and self.ring is not None and (known := self.ring.get(key_id or "")) is not None:
            self._records.add(known, reason, clock, over="http")
        return ApiError(response)


def _name_in(host: str) -> str:
    """Returns the name or address in a host, which may have a port."""
    name, _, port = host.lower().rpartition(":")
    return (name if port.isdigit() else host.lower()).strip("[].")


def _may_be_strangers(name: str) -> bool:
    """Whether anyone on the internet may have registered a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." in name and not name.endswith(tuple(f".{suffix}" for suffix in _NOT_PUBLIC))
    return False
