"""Charges requests to the limits of their key and of their tenant, from what this router has leased of each.

A request is charged once, when it comes, with its prompt and the answer that is expected; when it ends, the charge is
corrected by what it has really taken. Between them, nothing is charged again. What has to be leased or renewed is
collected here, and fetched by `quota.py`."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from tokenbus.protocol.access.keys import KeyLimits
from tokenbus.protocol.wire import codec, messages, subjects
from tokenbus.router.access.slots import SlotShare
from tokenbus.router.access.windows import DAY_S, WINDOW_S, WindowShare

MAX_ACCOUNTS = 16_384
"""Shares that are kept; beyond that, the least recently used ones are dropped."""
MAX_EXPECTED = 4_096
"""Means of answers that are kept."""
_FIRST_ANSWER = 256.0
"""Tokens that an answer is expected to have while nothing is known."""
_UNTIL_SLOT_S = 1.0
_HALF_S = 30.0
_MAX_SHOWN = 16
"""Limits that operators are shown."""

REQUESTS, TOKENS, TOKENS_A_DAY, CONCURRENCY = "requests", "tokens", "tokens_per_day", "concurrency"
_SHOWN = {REQUESTS: "requests per minute", TOKENS: "tokens per minute", TOKENS_A_DAY: "tokens per day"}


class TenantLimits(NamedTuple):
    """Limits of one tenant; 0 means unlimited."""

    concurrency: int = 0
    """Requests open at the same time."""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Prompt and completion tokens."""


class Account(NamedTuple):
    """One limit of one key or tenant."""

    scope: str
    """The id of a key, or `=` and the token of a tenant, which no id contains."""
    unit: str


class Throttled(NamedTuple):
    """The reason for which a request is refused, and the seconds until a retry may succeed."""

    account: Account
    reason: str
    retry_after_s: float


class Wanted(NamedTuple):
    """The shares of which more has to be leased before a request can be let through."""

    accounts: tuple[Account, ...]


class Refusals:
    """Counts refusals of the last minute, by half minutes."""

    __slots__ = ("_before", "_half", "_now")

    def __init__(self) -> None:
        self._half = self._now = self._before = 0

    def add(self, now: float) -> None:
        self._roll(now)
        self._now += 1

    def count(self, now: float) -> int:
        """Returns the refusals of at least the last half minute, and at most of the last minute."""
        self._roll(now)
        return self._before + self._now

    def _roll(self, now: float) -> None:
        half = int(now // _HALF_S)
        if half != self._half:
            self._before = self._now if half == self._half + 1 else 0
            self._half, self._now = half, 0


class _Client(NamedTuple):
    """The limits of a key and of its tenant, and this router's shares of them."""

    of_key: KeyLimits
    of_tenant: KeyLimits
    windows: tuple[tuple[Account, WindowShare], ...]
    slots: tuple[tuple[Account, SlotShare], ...]


class _Refused(NamedTuple):
    """Refusals of one key or tenant."""

    refusals: Refusals
    client: tuple[str, str]
    """The tenant and the key of the last request."""


NO_LIMITS = KeyLimits()
_NO_CLIENT = _Client(NO_LIMITS, NO_LIMITS, (), ())


class Ticket:
    """The charge of a request, to be settled when it ends."""

    __slots__ = ("client", "num_pending", "num_tokens")

    def __init__(self, client: _Client, num_tokens: int, num_pending: int = 0) -> None:
        self.client = client
        self.num_tokens = num_tokens
        self.num_pending = num_pending
        """Those of them that this router has charged, and no other one."""

    def __repr__(self) -> str:
        return f"<Ticket of {self.num_tokens} tokens>"


FREE = Ticket(_NO_CLIENT, 0)
"""The ticket of requests that have no limits."""


class Limits:
    """All limits, as one router sees them. Times `now` are the broker's Unix time."""

    def __init__(
        self,
        tenants: TenantLimits,
        overrides: Mapping[str, TenantLimits],
        limits_of_key: Callable[[str], KeyLimits] | None,
    ) -> None:
        """`tenants` are the limits of each tenant without an override; `limits_of_key` returns those of a key's id, if
        there are keys."""
        self._limits_of_key = limits_of_key
        self.set_limits(tenants, overrides)
        self.windows: OrderedDict[Account, WindowShare] = OrderedDict()
        self.slots: OrderedDict[Account, SlotShare] = OrderedDict()
        self.wanted: dict[Account, None] = {}
        """Shares for which more is to be leased."""
        self.on_wanted: Callable[[], None] = lambda: None
        self.refusals = Refusals()
        self._refused: OrderedDict[str, _Refused] = OrderedDict()
        """By scope, those refused last at the end."""
        self._clients: dict[tuple[str, str], _Client] = {}
        self._expected: OrderedDict[tuple[str, str], float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Limits, {len(self.windows)} windows, {len(self.slots)} slots>"

    def set_limits(self, tenants: TenantLimits, overrides: Mapping[str, TenantLimits]) -> None:
        """Changes the limits of tenants; what they have used counts."""
        self._tenants = KeyLimits(**tenants._asdict())
        self._overrides = {name: KeyLimits(**one._asdict()) for name, one in overrides.items()}
        self._has_tenant_limits = any(one != NO_LIMITS for one in (self._tenants, *self._overrides.values()))

    @property
    def are_used(self) -> bool:
        """Whether any client may have limits."""
        return self._limits_of_key is not None or self._has_tenant_limits

    def has_any(self, address: subjects.ModelAddress) -> bool:
        """Whether a client may have limits; quick if it has none."""
        return bool(address.key_id) or self._has_tenant_limits

    def admit(
        self, address: subjects.ModelAddress, num_prompt: int, most: int | None, now: float
    ) -> Ticket | Throttled | Wanted:
        """Charges a request with `num_prompt` tokens whose answer has at most `most`, unless leases have to be waited
        for, to try again afterwards."""
        client = self._client_of(address)
        if client is _NO_CLIENT:
            return FREE
        wanted: list[Account] = []
        for account, share in client.windows:
            share.roll(now)
            if share.granted > share.spent:
                continue
            if share.is_full:
                self._note_refusal(account, address, now)
                words = f"{_of(account, address)} has used up its {share.limit:g} {_SHOWN[account.unit]} for now"
                return Throttled(account, words, share.wait_s(now))
            wanted.append(account)
            self._want(account, share, now)
        for account, slots in client.slots:
            slots.expire(now)
            if slots.has_room:
                continue
            if now < slots.full_until:
                self._note_refusal(account, address, now)
                words = f"{_of(account, address)} has as many open requests as it may have: {slots.limit}"
                return Throttled(account, words, _UNTIL_SLOT_S)
            slots.is_needed = True
            wanted.append(account)
            self._want(account, slots, now)
        if wanted:
            return Wanted(tuple(wanted))
        num_tokens = num_prompt + self._expected_answer(address, most)
        for account, share in client.windows:
            share.charge(1.0 if account.unit == REQUESTS else num_tokens)
            share.pending += num_tokens
            if share.needs_lease_ahead or now >= share.stale_at:
                self._want(account, share, now)
        self._open(client, now)
        return Ticket(client, num_tokens, num_tokens)

    def adopt(self, address: subjects.ModelAddress, num_charged: int, now: float) -> Ticket:
        """Counts a request of another router, which has charged it with that many tokens, as open here."""
        client = self._client_of(address) if self.has_any(address) else _NO_CLIENT
        self._open(client, now)
        return Ticket(client, num_charged)

    def close(self, ticket: Ticket, address: subjects.ModelAddress, num_tokens: int | None, completion: int) -> None:
        """Corrects the charge of a request that has ended, or is left to another router: then `num_tokens` is None."""
        client = ticket.client
        if client is _NO_CLIENT:
            return
        for _, share in client.windows:
            share.pending -= ticket.num_pending
        if num_tokens is not None and num_tokens != ticket.num_tokens:
            for account, share in client.windows:
                if account.unit != REQUESTS:
                    share.settle(num_tokens - ticket.num_tokens)
        for account, slots in client.slots:
            slots.num_open -= 1
            if slots.is_idle:
                slots.has_ended = slots.asked_at is not None
                self._want(account, slots, slots.until)
        ticket.client = _NO_CLIENT
        if num_tokens is not None and completion:
            self._learn((address.key_id or address.tenant, address.model), completion)

    def report(self, address: subjects.ModelAddress, now: float) -> messages.RateLimits | None:
        """Returns what key and tenant have left, for the client; None if they have no limits per minute or day."""
        return _report(self._client_of(address).windows, now)

    def seen_by(self, tenant: str, key_id: str, now: float) -> list[messages.ClientLimits]:
        """Returns the limits of a key and of its tenant, for a viewer with this key, or without one."""
        client = self._client_of(subjects.ModelAddress("", tenant, key_id))
        named = ((key_id, key_id), ("", f"={subjects.encode_name(tenant)}"))
        return [self._seen(tenant, key, client, scope, now) for key, scope in named if _has(client, scope)]

    def most_refused(self, now: float) -> list[messages.ClientLimits]:
        """Returns the limits of which most was refused in the last minute, for operators."""
        while self._refused and not next(iter(self._refused.values())).refusals.count(now):
            self._refused.popitem(last=False)
        counts = [(one.refusals.count(now), scope, one.client) for scope, one in self._refused.items()]
        return [
            self._seen(of[0], "" if scope.startswith("=") else scope, self._clients[of], scope, now)
            for _, scope, of in heapq.nlargest(_MAX_SHOWN, counts)
            if of in self._clients and _has(self._clients[of], scope)
        ]

    def _seen(self, tenant: str, key_id: str, client: _Client, scope: str, now: float) -> messages.ClientLimits:
        windows = [(account, share) for account, share in client.windows if account.scope == scope]
        slots = next((one for account, one in client.slots if account.scope == scope), None)
        refused = self._refused.get(scope)
        return messages.ClientLimits(
            tenant=tenant,
            key_id=key_id,
            rate_limits=codec.unset_if_none(_report(windows, now)),
            open=0 if slots is None else slots.num_open,
            max_open=0 if slots is None else slots.limit,
            refused=0 if refused is None else refused.refusals.count(now),
        )

    def _note_refusal(self, account: Account, address: subjects.ModelAddress, now: float) -> None:
        self.refusals.add(now)
        known = self._refused.pop(account.scope, None)
        refusals = Refusals() if known is None else known.refusals
        self._refused[account.scope] = _Refused(refusals, (address.tenant, address.key_id))
        refusals.add(now)
        if len(self._refused) > MAX_ACCOUNTS:
            self._refused.popitem(last=False)

    def want_days(self) -> None:
        """Has the records of all days of which something is known to be taken read, and corrected."""
        for account, share in self.windows.items():
            if share.taken and share.seconds == DAY_S:
                self.wanted[account] = None

    def due(self, now: float) -> list[Account]:
        """Returns the slots that have to be renewed or given back."""
        return [account for account, slots in self.slots.items() if slots.is_due(now)]

    def _client_of(self, address: subjects.ModelAddress) -> _Client:
        """Returns the limits of a client; those of its key or tenant may have changed since it was last asked."""
        of_key = of_tenant = NO_LIMITS
        if address.key_id and self._limits_of_key is not None:
            of_key = self._limits_of_key(address.key_id)
        if self._has_tenant_limits:
            of_tenant = self._overrides.get(address.tenant, self._tenants)
        known = self._clients.get((address.tenant, address.key_id))
        if known is not None and known.of_key is of_key and known.of_tenant is of_tenant:
            return known
        if of_key == NO_LIMITS == of_tenant:
            return _NO_CLIENT
        if len(self._clients) >= MAX_ACCOUNTS:
            self._clients.clear()
        scopes = ((address.key_id, of_key), (f"={subjects.encode_name(address.tenant)}", of_tenant))
        windows = [one for scope, limits in scopes for one in self._windows_of(scope, limits)]
        slots = [self._slots_of(scope, limits.concurrency) for scope, limits in scopes if limits.concurrency]
        client = _Client(of_key, of_tenant, tuple(windows), tuple(slots))
        self._clients[address.tenant, address.key_id] = client
        return client

    def _windows_of(self, scope: str, limits: KeyLimits) -> Iterator[tuple[Account, WindowShare]]:
        if limits.requests_per_minute:
            yield self._window(Account(scope, REQUESTS), limits.requests_per_minute, WINDOW_S)
        if limits.tokens_per_minute:
            yield self._window(Account(scope, TOKENS), limits.tokens_per_minute, WINDOW_S)
        if limits.tokens_per_day:
            yield self._window(Account(scope, TOKENS_A_DAY), limits.tokens_per_day, DAY_S)

    def _window(self, account: Account, limit: int, seconds: float) -> tuple[Account, WindowShare]:
        share = self.windows.get(account)
        if share is None:
            if len(self.windows) >= MAX_ACCOUNTS:
                self.windows.popitem(last=False)
                self._clients.clear()
            share = self.windows[account] = WindowShare(limit, seconds)
        self.windows.move_to_end(account)  # each time that one is dropped, all clients are looked up again
        share.set_limit(limit)
        return account, share

    def _slots_of(self, scope: str, limit: int) -> tuple[Account, SlotShare]:
        account = Account(scope, CONCURRENCY)
        slots = self.slots.get(account)
        if slots is None:
            if len(self.slots) >= MAX_ACCOUNTS:
                idle = next((one for one, held in self.slots.items() if not held.num_open), next(iter(self.slots)))
                del self.slots[idle]
                self._clients.clear()
            slots = self.slots[account] = SlotShare(limit)
        self.slots.move_to_end(account)
        slots.set_limit(limit)
        return account, slots

    def _open(self, client: _Client, now: float) -> None:
        for account, slots in client.slots:
            slots.num_open += 1
            if slots.needs_lease and now >= slots.full_until:
                self._want(account, slots, now)

    def _want(self, account: Account, share: WindowShare | SlotShare, now: float) -> None:
        if share.asked_at is None:
            share.asked_at = now
            self.wanted[account] = None
            self.on_wanted()

    def _expected_answer(self, address: subjects.ModelAddress, most: int | None) -> int:
        if most == 0:
            return 0
        mean = self._expected.get((address.key_id or address.tenant, address.model), _FIRST_ANSWER)
        return int(mean if most is None else min(mean, most))

    def _learn(self, of: tuple[str, str], completion: int) -> None:
        mean = self._expected.pop(of, None)
        self._expected[of] = float(completion) if mean is None else mean + 0.1 * (completion - mean)
        if len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)


def _of(account: Account, address: subjects.ModelAddress) -> str:
    return f"tenant {address.tenant!r}" if account.scope.startswith("=") else f"the API key {account.scope}"


def _scopes(client: _Client) -> set[str]:
    return {account.scope for account, _ in (*client.windows, *client.slots)}


def _has(client: _Client, scope: str) -> bool:
    return bool(scope) and scope in _scopes(client)


def _report(windows: Iterable[tuple[Account, WindowShare]], now: float) -> messages.RateLimits | None:
    least: dict[bool, tuple[int, WindowShare]] = {}
    for account, share in windows:
        share.roll(now)
        is_requests, remaining = account.unit == REQUESTS, share.remaining
        if is_requests not in least or remaining < least[is_requests][0]:
            least[is_requests] = remaining, share
    if not least:
        return None
    return messages.RateLimits(requests=_told(least.get(True), now), tokens=_told(least.get(False), now))


def _told(least: tuple[int, WindowShare] | None, now: float) -> messages.RateLimit | None:
    if least is None:
        return None
    remaining, share = least
    return messages.RateLimit(limit=int(share.limit), remaining=remaining, reset_ms=round(1e3 * share.reset_s(now), 1))
