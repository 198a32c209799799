"""Makes digests of a fleet: what has changed of its workers since the last one, in parts that fit into messages. Pure.

Nothing is kept while nobody looks: a `FleetDigests` is made for the first viewer and dropped after the last."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from tokenbus.protocol.wire import codec, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.workers.worker import Worker

_MIB = 1 << 20
_MEMORY_SHARE = 0.01
"""Memory that changed by less than this share of what there was is not told again."""


class FleetDigests:
    """The digests of one router, one after the other."""

    def __init__(self, fleet: Fleet, life: str) -> None:
        """`life` names this series: numbers of workers mean nothing in another one."""
        self._fleet = fleet
        self._life = life
        self._seq = 0
        self._known: dict[str, _Seen] = {}
        """The workers of the last digest, by their incarnations."""
        self._next_number = 0
        self._updated_at = 0.0
        self._changes = messages.FleetDigest()

    def __repr__(self) -> str:
        return f"<FleetDigests {self._life} {self._seq}, {len(self._known)} workers>"

    def update(self, router: messages.RouterStats, queues: Sequence[messages.ModelQueue], now: float) -> None:
        """Compares the fleet with the last digest, and begins the next one."""
        joined, numbers, memory = [], [], []
        left = set(self._known)
        passed_s = now - self._updated_at
        for worker in self._fleet.lost.all(now):
            left.discard(worker.incarnation)
            seen, sheet = self._see(worker)
            joined += [] if sheet is None else [sheet]
            state = "loading" if worker.has_successor else "lost"
            if (changed := messages.WorkerNumbers(number=seen.number, state=state)) != seen.numbers:
                seen.numbers = changed
                numbers.append(changed)
        for _, workers in self._fleet.models():
            for worker in workers:
                left.discard(worker.incarnation)
                seen, sheet = self._see(worker)
                joined += [] if sheet is None else [sheet]
                if (changed := self._numbers(seen, worker, passed_s, now)) != seen.numbers:
                    seen.numbers = changed
                    numbers.append(changed)
                if (taken := _memory(seen, worker)) is not None:
                    seen.memory = taken
                    memory.append(taken)
        gone = [self._known.pop(one).number for one in left]
        self._updated_at = now
        self._seq += 1
        self._changes = messages.FleetDigest(
            router_id=router.router_id,
            router=router,
            life=self._life,
            seq=self._seq,
            joined=joined,
            workers=numbers,
            memory=memory,
            left=gone,
            queues=list(queues),
        )

    def changes(self, max_bytes: int, encoding: codec.Encoding) -> list[bytes]:
        """Returns the messages that say what has changed."""
        return _parts(self._changes, max_bytes, encoding)

    def whole(self, max_bytes: int, encoding: codec.Encoding) -> list[bytes]:
        """Returns the messages that say everything, as of the last update."""
        seen = self._known.values()
        everything = codec.replace(
            self._changes,
            whole=True,
            joined=[one.sheet for one in seen if one.sheet is not None],
            workers=[one.numbers for one in seen if one.numbers is not None],
            memory=[one.memory for one in seen if one.memory is not None],
            left=[],
        )
        return _parts(everything, max_bytes, encoding)

    def _see(self, worker: Worker) -> "tuple[_Seen, messages.WorkerSheet | None]":
        """Returns what was shown of a worker, and its sheet if that is new."""
        seen = self._known.get(worker.incarnation)
        if seen is None:
            seen = self._known[worker.incarnation] = _Seen(self._next_number, worker)
            self._next_number += 1
        sheet = _sheet(seen.number, worker)
        if sheet == seen.sheet:
            return seen, None
        seen.sheet = sheet
        return seen, sheet

    def _numbers(self, seen: "_Seen", worker: Worker, passed_s: float, now: float) -> messages.WorkerNumbers:
        load = worker.load
        per_s = 0.0
        if (sampled := load.generated_tokens - seen.generated_tokens) > 0 and passed_s > 0.0:
            per_s = sampled / passed_s
        seen.generated_tokens = load.generated_tokens
        return messages.WorkerNumbers(
            number=seen.number,
            state=worker.shown_state(now),
            running=load.running,
            max_running=load.max_running or worker.card.max_num_seqs,
            waiting=load.waiting,
            booked=len(worker.bookings),
            queued_prefill_tokens=load.queued_prefill_tokens,
            tokens_per_s=round(per_s, 1),
            token_ms=round(worker.speed.itl_s * 1e3, 1),
            step_age_ms=round(load.step_age_ms),
            hit_rate=round(load.cached_tokens / load.prompt_tokens, 3) if load.prompt_tokens else 0.0,
            used_blocks=load.used_blocks,
            cached_blocks=load.cached_blocks,
            total_blocks=load.used_blocks + load.cached_blocks + load.free_blocks,
            expected_blocks=load.expected_blocks,
            host_blocks=load.host_blocks,
            kept_blocks=load.kept_blocks,
            fetched_blocks=load.fetched_blocks,
            indexed_blocks=self._fleet.num_indexed(worker),
            events=worker.event_state,
            lost_events=worker.log.num_lost,
            kv_pool_bytes=load.kv_pool_bytes,
        )


class _Seen:
    """A worker as the last digest showed it."""

    __slots__ = ("generated_tokens", "memory", "number", "numbers", "sheet")

    def __init__(self, number: int, worker: Worker) -> None:
        self.number = number
        self.generated_tokens = worker.load.generated_tokens
        self.sheet: messages.WorkerSheet | None = None
        self.numbers: messages.WorkerNumbers | None = None
        self.memory: messages.WorkerMemory | None = None


def _sheet(number: int, worker: Worker) -> messages.WorkerSheet:
    card = worker.card
    return messages.WorkerSheet(
        number=number,
        worker_id=card.worker_id,
        model=card.model,
        engine=card.engine,
        host=card.host,
        max_num_seqs=card.max_num_seqs,
        role=card.role,
        site=card.site,
        since_ms=subjects.epoch_sort_key(card.epoch)[0],
        kv_block_bytes=card.kv_token_bytes * (card.kv_block_size or 0),
    )


def _memory(seen: _Seen, worker: Worker) -> messages.WorkerMemory | None:
    """Returns a worker's memory if it should be told, which is not so after every little change."""
    health = worker.health
    if health is None:
        return None
    taken = messages.WorkerMemory(
        number=seen.number,
        front_mib=health.front_bytes // _MIB,
        engine_mib=health.engine_bytes // _MIB,
        engine_since_s=round(health.uptime_s - health.engine_uptime_s),
        devices=[(one.name, one.total_bytes // _MIB, one.free_bytes // _MIB) for one in health.devices],
    )
    before = seen.memory
    return taken if before is None or _differs(before, taken) else None


def _differs(before: messages.WorkerMemory, after: messages.WorkerMemory) -> bool:
    pairs = [(before.front_mib, after.front_mib), (before.engine_mib, after.engine_mib)]
    if [one[:2] for one in before.devices] != [one[:2] for one in after.devices]:
        return True
    pairs += [(one[2], other[2]) for one, other in zip(before.devices, after.devices, strict=True)]
    return any(abs(one - other) > _MEMORY_SHARE * one for one, other in pairs)


def _parts(digest: messages.FleetDigest, max_bytes: int, encoding: codec.Encoding) -> list[bytes]:
    """Returns a digest as messages of at most `max_bytes`, as long as one worker fits into one."""
    pieces = _split(digest, max_bytes, encoding)
    numbered = (codec.replace(one, part=number, parts=len(pieces)) for number, one in enumerate(pieces))
    return [codec.encode(one, encoding) for one in numbered]


def _split(digest: messages.FleetDigest, max_bytes: int, encoding: codec.Encoding) -> list[messages.FleetDigest]:
    """Divides a digest in halves until each fits. Sheets come before numbers, and numbers before memory."""
    items = [*digest.joined, *digest.workers, *digest.memory]
    if len(items) < 2 or len(codec.encode(digest, encoding)) <= max_bytes - _NUMBERING_BYTES:
        return [digest]
    half = len(items) // 2
    empty = codec.replace(digest, joined=[], workers=[], memory=[])
    first = _with(empty, items[:half])
    rest = _with(codec.replace(empty, router=UNSET, queues=[], left=[]), items[half:])
    return _split(first, max_bytes, encoding) + _split(rest, max_bytes, encoding)


_NUMBERING_BYTES = 64
"""Bytes that the numbers of parts add to a digest."""


def _with(empty: messages.FleetDigest, items: Sequence[msgspec.Struct]) -> messages.FleetDigest:
    return codec.replace(
        empty,
        joined=[one for one in items if isinstance(one, messages.WorkerSheet)],
        workers=[one for one in items if isinstance(one, messages.WorkerNumbers)],
        memory=[one for one in items if isinstance(one, messages.WorkerMemory)],
    )
