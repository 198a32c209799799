"""A process's records reach the log of a real broker once, in order, and wait in bounded memory while it is away."""

import asyncio
import datetime
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.jetstream import jetstream_config
from tokenbus.cli.console import nats_server
from tokenbus.protocol.access import audit
from tokenbus.protocol.access.audit_log import AuditLog, AuditSettings, AuditWriter, StoredRecord
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus.bucket import BucketError, BucketMissingError

EVER = "1970-01-01T00:00:00+00:00"
_prefixes = (f"audit{number}.v1" for number in count())


@pytest.fixture
def log(jetstream: nats.Connection) -> AuditLog:
    return AuditLog(jetstream, next(_prefixes))


class CountedWriter(AuditWriter):
    """Counts what is stored and lost."""

    def __init__(self, log: AuditLog, max_queued: int = 1_000) -> None:
        super().__init__(log, AuditSettings(audit=True), max_queued)
        self.stored: list[int] = []
        self.lost: list[int] = []
        self.on_stored, self.on_lost = self.stored.append, self.lost.append

    def add_all(self, *names: str) -> None:
        for name in names:
            self.add("request", name, "acme", "k1")


def whats(records: list[StoredRecord]) -> list[str]:
    return ["unreadable" if one.record is None else one.record.what for one in records]


async def test_records_are_stored_and_read_from_a_time_or_a_number_on(log: AuditLog) -> None:
    writer = CountedWriter(log)
    writer.add_all("a", "b")
    writer.add("key", "create", "acme.eu", "me@host")
    assert await writer.write()
    assert sum(writer.stored) == 3
    found, is_complete = await log.page(EVER, audit.pattern_of())
    assert is_complete
    assert sorted(whats(found)) == ["a", "b", "create"]
    assert whats((await log.page(found[1].number + 1, audit.pattern_of()))[0]) == whats(found[2:])
    assert whats((await log.page(EVER, audit.pattern_of("acme.eu")))[0]) == ["create"]
    assert whats((await log.page(EVER, audit.pattern_of(kind="request")))[0]) == ["a", "b"]
    tomorrow = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    assert await log.page(tomorrow.isoformat(), audit.pattern_of()) == ([], True)


async def test_a_record_whose_answer_is_lost_is_not_stored_twice(log: AuditLog) -> None:
    await log.create(AuditSettings())
    for _ in range(2):
        await log.add(audit.record(0.0, "request", "a"), "the id")
    assert whats((await log.page(EVER, audit.pattern_of()))[0]) == ["a"]


async def test_a_log_that_is_gone_is_made_again_and_gets_what_waits(log: AuditLog, jetstream: nats.Connection) -> None:
    writer = CountedWriter(log)
    assert await writer.write()
    await jetstream.jetstream(2.0).delete_stream(log.stream)
    writer.add_all("a", "b")
    assert not await writer.write()
    writer.add_all("c")
    assert await writer.write()
    assert (len(writer), sum(writer.stored), writer.lost) == (0, 3, [])
    assert sorted(whats((await log.page(EVER, audit.pattern_of()))[0])) == ["a", "b", "c"]


async def test_nobody_takes_records_out_of_the_log(log: AuditLog, jetstream: nats.Connection) -> None:
    await log.create(AuditSettings())
    await log.add(audit.record(0.0, "request", "a"), "1")
    with pytest.raises(BucketError, match="not permitted"):
        await log._ask("PURGE", {})
    with pytest.raises(BucketError, match="not permitted"):
        await log._ask("MSG.DELETE", {"seq": 1})
    assert whats((await log.page(EVER, audit.pattern_of()))[0]) == ["a"]


async def test_a_log_that_keeps_something_else_than_asked_for_is_told(log: AuditLog) -> None:
    assert await log.create(AuditSettings(audit_days=30))
    assert await log.create(AuditSettings(audit_days=30))
    assert not await log.create(AuditSettings(audit_days=31))


async def test_what_is_no_record_is_passed_over(log: AuditLog, jetstream: nats.Connection) -> None:
    await log.create(AuditSettings())
    await log._put("acme.request", b"nonsense", None)
    await log.add(audit.record(0.0, "request", "a"), "1")
    assert whats((await log.page(EVER, audit.pattern_of()))[0]) == ["unreadable", "a"]


async def test_one_act_that_several_processes_record_is_stored_once(log: AuditLog) -> None:
    for writer in (CountedWriter(log), CountedWriter(log)):
        writer.add("connection", "closed", once="broker 7")
        assert await writer.write()
    assert whats((await log.page(EVER, audit.pattern_of()))[0]) == ["closed"]


async def test_while_the_broker_is_away_nothing_is_sent_and_what_waits_is_stored_once_after(tmp_path: Path) -> None:
    config = jetstream_config(tmp_path)
    running = await nats_server.start(0, tmp_path / "nats.log", config)
    connection = await nats.connect(nats.BusSettings(url=running.url), "test")
    try:
        log = AuditLog(connection, "audit.v1")
        writer = CountedWriter(log)
        writer.add_all("a")
        assert await writer.write()
        running.kill()
        async with asyncio.timeout(60):
            while connection.is_connected:
                await asyncio.sleep(0.01)
            writer.add_all("b", "c")
            for _ in range(3):
                assert not await writer.write()
            assert connection._client.pending_data_size == 0
            running = await nats_server.start(urlsplit(running.url).port or 0, tmp_path / "nats.log", config)
            while not await writer.write():
                await asyncio.sleep(0.01)
        assert (writer.stored, writer.lost) == ([1, 2], [])
        assert whats((await log.page(EVER, audit.pattern_of()))[0]) == ["a", "b", "c"]
    finally:
        await connection.close()
        running.stop()


async def test_without_jetstream_as_many_records_wait_as_may_and_the_others_are_counted(tmp_path: Path) -> None:
    running = await nats_server.start(0, tmp_path / "nats.log")
    try:
        connection = await nats.connect(nats.BusSettings(url=running.url), "test")
        log = AuditLog(connection, "audit.v1")
        writer = CountedWriter(log, max_queued=2)
        writer.add_all("a", "b", "c")
        assert not await writer.write()
        writer.add_all("d")
        with pytest.raises(BucketMissingError, match="no JetStream"):
            await log.create(AuditSettings())
        assert (len(writer), len(writer.lost), writer.stored) == (2, 2, [])
        with pytest.raises(BucketMissingError):
            await log.page(EVER, audit.pattern_of())
        await writer.close()
        assert (len(writer), sum(writer.lost)) == (0, 4)
        await connection.close()
    finally:
        running.stop()
