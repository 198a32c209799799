"""Over a real broker: leases, parts, and both ends in the hands of an enemy. Blocks move no faster than the pace."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.kv_exchange.stubs import ADAPTERS, CONFIG, StubEngine, block, given_block, prefix, serving
from tokenbus.cli.console import nats_server
from tokenbus.protocol.bus import connection
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.wire import block_hash, codec, internal, subjects
from tokenbus.worker.broker.own_subjects import OwnSubjects
from tokenbus.worker.kv_exchange import checksums, holder, transport
from tokenbus.worker.kv_exchange.holder import LEASE_S, UNREAD_S, Holder
from tokenbus.worker.kv_exchange.transport import BlockTransport, Pace, TransferError

NAMES = subjects.Subjects()
ADAPTERS_ASKED = [internal.RunAdapter(digest=one.digest, scale=one.scale) for one in ADAPTERS]
NUM_BYTES = len(block(0))


class End:
    """One worker's end of the exchange."""

    def __init__(self, url: str, name: str, incoming: Bus) -> None:
        self.engine = StubEngine()
        self.holder = Holder(lambda epoch: epoch == "1-x")
        self.holder.engine_changed(serving(self.engine))
        self.incoming = incoming
        self.num_connections = 0
        self._url = url
        self.transport = BlockTransport(incoming, self._connect, NAMES, "demo", name, self.holder, lambda: False)

    async def _connect(self) -> Bus:
        self.num_connections += 1
        return await connection.connect(connection.BusSettings(url=self._url), "kv")


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[tuple[End, End]]:
    """Workers a, which has 40 blocks, and b."""
    broker = await nats_server.start(0, tmp_path / "nats.log")
    found = []
    for name in ("a", "b"):
        end = End(broker.url, name, await connection.connect(connection.BusSettings(url=broker.url), name))
        own = OwnSubjects(end.incoming, NAMES, "demo", name)
        await end.transport.open(own.serve)
        await own.open()
        await end.incoming.flush()
        found.append(end)
    found[0].engine.blocks = {number: block(number) for number in range(40)}
    yield found[0], found[1]
    for end in found:
        await end.transport.close()
        await end.incoming.close()
    broker.stop()


def request(**changes: object) -> internal.BlockLeaseRequest:
    fields: dict[str, object] = {
        "identity": CONFIG.kv_identity,
        "epoch": "1-x",
        "tenant": "acme",
        "cache_salt": "salt",
        "adapters": ADAPTERS_ASKED,
        "token_ids": prefix(40).token_ids[:-4],
    }
    return internal.BlockLeaseRequest(**fields | changes)  # type: ignore[arg-type]


async def test_a_connection_that_is_being_opened_outlives_the_fetch_that_wanted_it(ends: tuple[End, End]) -> None:
    _, b = ends
    first = asyncio.create_task(b.transport.lease("a", request()))
    while not b.num_connections:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert (await b.transport.lease("a", request())).num_blocks == 40
    assert b.num_connections == 1


async def test_blocks_arrive_as_they_were_sent_over_connections_that_are_opened_for_them(
    ends: tuple[End, End],
) -> None:
    a, b = ends
    assert a.num_connections == b.num_connections == 0
    lease = await b.transport.lease("a", request(first=3))
    assert lease.num_blocks == 37
    contents = await asyncio.gather(*(lease.read(number, NUM_BYTES) for number in range(3, 40)))
    assert contents == [block(number) for number in range(3, 40)]
    assert (a.engine.last_exports.count(True), len(a.engine.last_exports)) == (1, 2), "the lease, and one batch"
    assert a.transport.given_bytes == 37 * NUM_BYTES
    lease.close()
    while a.holder.num_leases:
        await asyncio.sleep(0.01)
    assert a.num_connections == b.num_connections == 1


async def test_a_block_of_many_parts_is_put_together(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "part_bytes", lambda max_payload: 7)
    _, b = ends
    lease = await b.transport.lease("a", request())
    assert await lease.read(5, NUM_BYTES) == block(5)


async def test_a_block_is_hashed_once_at_either_end_however_many_parts_it_has(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: Counter[bytes] = Counter()
    monkeypatch.setattr(transport, "part_bytes", lambda max_payload: 1 + NUM_BYTES // 10)

    def count(contents: Sequence[bytes]) -> list[int]:
        hashed.update(contents)
        return hash_all(contents)

    hash_all = checksums._checksums
    monkeypatch.setattr(checksums, "_checksums", count)
    lease = await ends[1].transport.lease("a", request())
    assert await asyncio.gather(*(lease.read(number, NUM_BYTES) for number in range(8))) == list(map(block, range(8)))
    lease.close()
    assert [hashed[block(number)] for number in range(8)] == [2] * 8


async def test_large_blocks_are_hashed_by_another_thread_than_the_one_that_keeps_the_worker_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def note(contents: Sequence[bytes]) -> list[int]:
        threads.append(threading.get_ident())
        return [len(content) for content in contents]

    monkeypatch.setattr(checksums, "_checksums", note)
    assert await checksums.checksums_of([b"small"]) == [5]
    assert await checksums.checksums_of([bytes(1 << 20)] * 2) == [1 << 20] * 2
    assert threads[0] == threading.get_ident() != threads[1]


async def test_a_question_larger_than_a_message_comes_in_parts(ends: tuple[End, End]) -> None:
    a, b = ends
    long = CONFIG.context_length
    config = codec.replace(CONFIG, context_length=400_000)
    a.holder.engine_changed(serving(a.engine, config))
    lease = await b.transport.lease("a", request(token_ids=block_hash.pack_token_ids(range(300_000))))
    assert (long, lease.num_blocks) == (4_096, 40)


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": "other"},
        {"epoch": "0-x"},
        {"tenant": "globex"},
        {"cache_salt": ""},
        {"adapters": []},
        {"adapters": ADAPTERS_ASKED[:1]},
        {"adapters": [internal.RunAdapter(digest=one.digest, scale=1.0) for one in ADAPTERS_ASKED]},
        {"adapters": ADAPTERS_ASKED[::-1]},
        {"adapters": [*ADAPTERS_ASKED, ADAPTERS_ASKED[-1]]},
        {"adapters": ADAPTERS_ASKED * 3},
        {"first": 40},
        {"first": 2**31 - 1},
        {"token_ids": b""},
        {"token_ids": b"\1\2\3"},
        {"token_ids": bytes(4 * 4_097)},
    ],
)
async def test_a_question_that_is_not_for_this_cache_gets_nothing(
    ends: tuple[End, End], changes: dict[str, object]
) -> None:
    with pytest.raises(TransferError) as refusal:
        await ends[1].transport.lease("a", request(**changes))
    assert refusal.value.outcome == "nothing"


async def test_a_third_lease_is_refused_until_one_ends(ends: tuple[End, End]) -> None:
    a, b = ends
    first = await b.transport.lease("a", request())
    await b.transport.lease("a", request())  # never read, never released
    with pytest.raises(TransferError) as refusal:
        await b.transport.lease("a", request())
    assert refusal.value.outcome == "busy"
    first.close()
    while a.holder.num_leases == 2:
        await asyncio.sleep(0.01)
    await b.transport.lease("a", request())


async def test_a_lease_that_nobody_reads_ends_and_its_blocks_with_it(
    ends: tuple[End, End],
) -> None:
    a, b = ends
    lease = await b.transport.lease("a", request())
    a.holder.tick(time.monotonic() + LEASE_S)
    with pytest.raises(TransferError) as gone:
        await lease.read(0, NUM_BYTES)
    assert gone.value.outcome == "evicted"


@pytest.mark.parametrize("order", [range(40), range(39, -1, -1), [number * 11 % 40 for number in range(40)]])
@pytest.mark.parametrize("is_stuck", [False, True])
async def test_a_reader_in_any_order_makes_a_holder_keep_few_blocks(
    monkeypatch: pytest.MonkeyPatch, order: Sequence[int], is_stuck: bool
) -> None:
    monkeypatch.setattr(holder, "_BATCH_BYTES", 1)
    monkeypatch.setattr(holder, "_PATIENCE_S", 0.001 if is_stuck else 60.0)
    engine, one = StubEngine(), Holder(lambda epoch: True)
    engine.blocks = {number: block(number) for number in range(40)}
    one.engine_changed(serving(engine))
    lease = await one.grant(request())
    if is_stuck:
        engine.gate.clear()
    for number in order:
        expected = holder.NoBlock.LATER if is_stuck else given_block(number)
        assert await one.read(lease.lease, number) == expected
        assert len(one._open[lease.lease]._batches) <= 16
    assert not is_stuck or len(engine.last_exports) <= 1 + 16
    engine.gate.set()
    while (found := await one.read(lease.lease, 20)) is holder.NoBlock.LATER:
        await asyncio.sleep(0)
    assert found == given_block(20)


async def test_blocks_that_were_evicted_meanwhile_are_gone(ends: tuple[End, End]) -> None:
    a, b = ends
    lease = await b.transport.lease("a", request())
    a.engine.blocks = {}
    with pytest.raises(TransferError) as gone:
        await lease.read(0, NUM_BYTES)
    assert gone.value.outcome == "evicted"


async def test_a_holder_without_an_engine_gives_nothing(ends: tuple[End, End]) -> None:
    a, b = ends
    lease = await b.transport.lease("a", request())
    a.holder.engine_changed(None)
    with pytest.raises(TransferError):
        await lease.read(0, NUM_BYTES)
    with pytest.raises(TransferError):
        await b.transport.lease("a", request())


async def test_a_worker_that_is_not_there_is_noticed_at_once(ends: tuple[End, End]) -> None:
    with pytest.raises(TransferError) as lost:
        await ends[1].transport.lease("nobody", request())
    assert lost.value.outcome == "lost"


@pytest.mark.parametrize("answer", [b"", b"\xff\xff", codec.encode(internal.BlockPart(data=bytes(NUM_BYTES)))])
async def test_an_answer_that_is_no_part_or_has_a_wrong_checksum_is_refused(
    ends: tuple[End, End], answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = ends
    monkeypatch.setattr(transport, "ANSWER_S", 0.5)
    lease = await b.transport.lease("a", request())

    async def lie(read: internal.BlockRead, reply: str) -> None:
        assert a.transport._line is not None
        a.transport._line.bus.publish(reply, answer)

    monkeypatch.setattr(a.transport, "_give", lie)
    with pytest.raises(TransferError) as refused:
        await lease.read(0, NUM_BYTES)
    assert refused.value.outcome in ("corrupt", "lost", "evicted")


async def test_garbage_and_replies_to_others_are_dropped(ends: tuple[End, End]) -> None:
    _, b = ends
    lease = await b.transport.lease("a", request())
    seen: list[object] = []
    await b.incoming.subscribe("_INBOX.victim", seen.append)
    for payload in (b"", b"\xc1", codec.encode(request()), codec.encode(internal.BlockRead(lease="x", num_bytes=9))):
        for service in ("kv", "kv.read"):
            for reply in ("", "_INBOX.victim", "tokenbus.v1.worker.other.w.kv.reply.1", "tokenbus.v1.card.demo.a"):
                b.incoming.publish(NAMES.worker("demo", "a", service), payload, reply)
    for read in (
        internal.BlockRead(lease=lease._name, block=40, num_bytes=9),  # type: ignore[attr-defined]
        internal.BlockRead(lease=lease._name, block=0, offset=2**31 - 1, num_bytes=9),  # type: ignore[attr-defined]
        internal.BlockRead(lease=lease._name, block=0, num_bytes=2**31 - 1),  # type: ignore[attr-defined]
    ):
        b.incoming.publish(
            NAMES.worker("demo", "a", "kv.read"), codec.encode(read), NAMES.worker("demo", "b", "kv.reply.1")
        )
    assert await lease.read(0, NUM_BYTES) == block(0)
    await b.incoming.flush()
    assert not seen


async def test_the_connection_is_closed_a_minute_after_its_last_use(ends: tuple[End, End]) -> None:
    _, b = ends
    await b.transport.lease("a", request())
    used_at = b.transport._used_at
    b.transport.close_if_idle(used_at + transport.IDLE_S - 1)
    assert b.transport._line is not None
    b.transport.close_if_idle(used_at + transport.IDLE_S)
    while b.transport._line is not None:
        await asyncio.sleep(0.01)
    lease = await b.transport.lease("a", request())
    assert await lease.read(0, NUM_BYTES) == block(0)
    assert b.num_connections == 2


async def test_an_end_that_is_closed_opens_no_other_connection_for_those_who_still_read(ends: tuple[End, End]) -> None:
    a, b = ends
    lease = await b.transport.lease("a", request())
    a.engine.gate.clear()
    reading = asyncio.create_task(lease.read(0, NUM_BYTES))
    async with asyncio.timeout(10):
        while len(a.engine.last_exports) < 2:
            await asyncio.sleep(0.01)
        await a.transport.close()
        a.engine.gate.set()
        with pytest.raises(TransferError):
            await reading
        with pytest.raises(TransferError):
            await a.transport.lease("b", request())
    assert a.num_connections == 1


async def test_a_lease_that_is_granted_after_its_fetch_was_cancelled_is_given_back(ends: tuple[End, End]) -> None:
    a, b = ends
    a.engine.gate.clear()
    asking = asyncio.create_task(b.transport.lease("a", request()))
    async with asyncio.timeout(10):
        while not a.engine.last_exports:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
        granted = asyncio.Event()
        grant = a.holder.none_leased.clear
        a.holder.none_leased.clear = lambda: (grant(), granted.set())  # type: ignore[method-assign,func-returns-value]
        a.engine.gate.set()
        await granted.wait()
        began = asyncio.get_running_loop().time()
        await a.holder.none_leased.wait()
    assert asyncio.get_running_loop().time() - began < UNREAD_S / 2


@given(st.lists(st.tuples(st.integers(1, 300_000), st.floats(0, 0.05)), min_size=1, max_size=60))
def test_what_has_moved_by_any_time_is_the_pace_times_the_time_and_a_burst(moves: list[tuple[int, float]]) -> None:
    pace, now, moved = Pace(1_000_000.0), 0.0, 0
    for num_bytes, wait_s in moves:
        now += wait_s
        at = now + pace.delay_s(num_bytes, now)
        assert moved <= 1_000_000 * (at + 0.05) + 1
        moved += num_bytes


def test_after_a_pause_there_is_no_more_than_one_burst() -> None:
    pace = Pace(1_000.0)
    assert pace.delay_s(1_000, 100.0) == 0
    assert pace.delay_s(1, 100.0) == pytest.approx(0.95)
