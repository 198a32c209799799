"""Routers that enforce limits together, in virtual time: they race, die and pause, and their bucket is lost."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from nats.aio.msg import Msg

from tests.sim.world import Process, World
from tokenbus.protocol.access.keys import KeyLimits
from tokenbus.protocol.bus.bucket import (
    BucketConflictError,
    BucketError,
    BucketFullError,
    BucketLimits,
    BucketState,
    Entry,
)
from tokenbus.protocol.wire import errors, subjects
from tokenbus.router.access.limits import Limits, TenantLimits, Ticket
from tokenbus.router.access.quota import Quota
from tokenbus.router.access.windows import WINDOW_S
from tokenbus.router.telemetry.metrics import RouterMetrics

NAMES = subjects.Subjects()
ADDRESS = subjects.ModelAddress("demo", "acme")
KEY_ID = "abcdefghij"
_BEGAN = 1_790_000_000.0


class Broker:
    """A broker with one bucket, which can be lost, made again or cut off."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.entries: dict[str, Entry] = {}
        self.created: str | None = None
        self.is_down = self.is_full = False
        self.revision = 0
        self.p_lost_answer = 0.0
        self.slow: dict[str, float] = {}
        """Seconds that it takes to read the records of some scopes."""
        self.heard_by: dict[Process, Callable[[Msg], None]] = {}

    @property
    def now(self) -> float:
        return _BEGAN + self.world.now

    @property
    def stamp(self) -> str:
        return datetime.fromtimestamp(self.now, UTC).isoformat().replace("+00:00", "Z")

    def lose(self) -> None:
        self.entries, self.created, self.revision = {}, None, 0

    def publish(self, subject: str, payload: bytes) -> None:
        message = Msg(_client=None, subject=subject, data=payload)  # type: ignore[arg-type]
        for process, callback in self.heard_by.items():
            process.call(callback, message)


class Wire:
    """The bus and the bucket of one router: each message takes a while, and some answers are lost."""

    def __init__(self, broker: Broker, process: Process, rng: random.Random) -> None:
        self._broker, self._process, self._rng = broker, process, rng

    async def subscribe(self, subject: str, callback: Callable[[Msg], None], queue: str = "") -> str:
        self._broker.heard_by[self._process] = callback
        return subject

    def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        self._broker.world.at(self._broker.world.now + 1e-4, lambda: self._broker.publish(subject, payload))

    async def create(self, limits: BucketLimits) -> None:
        await self._hop()
        if self._broker.created is None:
            self._broker.created = self._broker.stamp
        await self._hop()

    async def state(self) -> BucketState:
        await self._hop()
        if self._broker.created is None:
            raise BucketError("there is no bucket")
        found = BucketState(self._broker.created, self._broker.revision)
        await self._hop()
        return found

    async def get(self, key: str) -> Entry | None:
        await self._hop()
        found = self._broker.entries.get(key)
        await asyncio.sleep(self._broker.slow.get(key.partition(".")[0], 0.0))
        await self._hop()
        return found

    async def put(self, key: str, value: bytes) -> int:
        return await self._store(key, value, None)

    async def create_entry(self, key: str, value: bytes) -> int:
        return await self._store(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        return await self._store(key, value, revision)

    async def _store(self, key: str, value: bytes, revision: int | None) -> int:
        await self._hop()
        broker = self._broker
        if broker.created is None:
            raise BucketError("there is no bucket")
        known = broker.entries.get(key)
        if revision is not None and revision != (known.revision if known else 0):
            await self._hop()
            raise BucketConflictError("wrong revision")
        if broker.is_full and known is None:
            await self._hop()
            raise BucketFullError("maximum bytes exceeded")
        broker.revision += 1
        broker.entries[key] = Entry(key, value, broker.revision, broker.stamp)
        if self._rng.random() < broker.p_lost_answer:
            await asyncio.sleep(0.5)
            raise BucketError("no answer")
        await self._hop()
        return broker.revision

    async def _hop(self) -> None:
        await asyncio.sleep(self._rng.expovariate(1 / 2e-4))
        if self._broker.is_down:
            await asyncio.sleep(0.2)
            raise BucketError("no answer")


class RouterOfWorld:
    """A router that admits requests, and knows how much it has let through in each window."""

    def __init__(self, made: "QuotaWorld", name: str) -> None:
        self.made, self.name = made, name
        self.process = made.world.process(name)
        rng = random.Random(made.rng.random())
        wire = Wire(made.broker, self.process, rng)
        key_limits = made.key_limits
        self.limits = Limits(made.tenant_limits, made.overrides, None if key_limits is None else lambda _: key_limits)
        self.num_open = 0
        self.metrics = RouterMetrics()
        self.quota = Quota(self.limits, wire, NAMES, name, wire, self.metrics, rng)  # type: ignore[arg-type]
        self.process.do(self.quota.open())
        self.process.spawn(self.quota.run())

    def ask(self, num_prompt: int, tenant: str = "acme", remaining_s: float | None = None) -> None:
        """Has a request come, whose answer is as long as expected."""
        self.process.call(lambda: self.process.spawn(self._ask(num_prompt, tenant, remaining_s)) and None)

    async def _ask(self, num_prompt: int, tenant: str, remaining_s: float | None) -> None:
        address = ADDRESS._replace(tenant=tenant, key_id="" if self.made.key_limits is None else KEY_ID)
        try:
            ticket, _ = await self.quota.admitted(address, num_prompt, 0, remaining_s)
        except errors.RequestError as refused:
            self.made.refused[tenant].append((self.made.world.now, refused.error.code))
            if remaining_s is not None and refused.error.code is errors.Code.DEADLINE_EXCEEDED:
                return
            assert refused.error.code is errors.Code.OVERLOADED
            assert refused.error.retry_after_ms is not None
            assert refused.error.retry_after_ms > 0
            self.made.num_refused += 1
            return
        self.made.note(self, ticket)
        self.made.let_through[tenant].append(self.made.world.now)
        await asyncio.sleep(self.made.rng.expovariate(1.0))
        self.quota.close(ticket, address, ticket.num_tokens)
        self.num_open -= 1


class QuotaWorld:
    """Several routers, and the load on them."""

    def __init__(
        self,
        world: World,
        num_routers: int,
        tenant_limits: TenantLimits,
        overrides: Mapping[str, TenantLimits] | None = None,
        key_limits: KeyLimits | None = None,
    ) -> None:
        """`key_limits` are those of a key that all requests have, if they have one."""
        self.key_limits = key_limits
        self.overrides = overrides or {}
        self.let_through: dict[str, list[float]] = defaultdict(list)
        """The times at which requests of each tenant were let through."""
        self.refused: dict[str, list[tuple[float, errors.Code]]] = defaultdict(list)
        """The times at which they were refused, and why."""
        self.world, self.rng, self.tenant_limits = world, world.rng, tenant_limits
        self.broker = Broker(world)
        self.routers: list[RouterOfWorld] = []
        self.num_refused = self.most_open = 0
        self.requests: dict[int, int] = defaultdict(int)
        self.tokens: dict[int, int] = defaultdict(int)
        self.seen: dict[int, set[str]] = defaultdict(set)
        """The routers that have let requests through, by window."""
        self._numbers = 0
        for _ in range(num_routers):
            self.add()

    @property
    def num_open(self) -> int:
        """The open requests of all routers that live."""
        return sum(router.num_open for router in self.routers)

    def add(self) -> RouterOfWorld:
        self._numbers += 1
        self.routers.append(RouterOfWorld(self, f"r{self._numbers}"))
        return self.routers[-1]

    def kill(self, router: RouterOfWorld) -> None:
        router.process.kill()
        self.routers.remove(router)
        self.broker.heard_by.pop(router.process, None)

    def note(self, router: RouterOfWorld, ticket: Ticket) -> None:
        window = int(self.broker.now // WINDOW_S)
        self.requests[window] += 1
        self.tokens[window] += ticket.num_tokens
        self.seen[window].add(router.name)
        router.num_open += 1
        self.most_open = max(self.most_open, self.num_open)

    def load(self, per_s: float, seconds: float, num_prompt: Callable[[], int]) -> None:
        """Lets requests come at random to routers that are not paused."""
        at, end = 0.0, seconds
        while (at := at + self.rng.expovariate(per_s)) < end:
            self.world.at(self.world.now + at, lambda: self._send(num_prompt()))

    def _send(self, num_prompt: int) -> None:
        if self.routers:
            self.rng.choice(self.routers).ask(num_prompt)

    def worst_excess(self, spent: dict[int, int], per_minute: float, largest: float) -> float:
        """Returns by how many of the largest requests, for each router that took part, routers have exceeded a limit
        at the worst: a whole minute's may be used at once, and then as much as passes."""
        worst = used = 0.0
        if spent:
            for window in range(min(spent), max(spent) + 1):
                used += spent.get(window, 0)
                took_part = set().union(*(self.seen.get(one, set()) for one in (window - 2, window - 1, window)))
                worst = max(worst, (used - per_minute) / (largest * max(1, len(took_part))))
                used = max(0.0, used - per_minute * WINDOW_S / 60)
        return worst
