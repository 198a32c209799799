"""A stream has ended once its terminal is made, though the engine continues and the broker has yet to take it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.worker.streams.test_resumed_streams import Worker
from tokenbus.protocol.wire import errors, limits


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    one = Worker()
    await one.start()
    yield one
    await one.engine.cleanup()


async def test_a_stream_whose_error_waits_for_the_broker_gets_no_other_terminal_when_it_is_cancelled(
    worker: Worker,
) -> None:
    assert worker.accept("r", max_tokens=200).accepted
    stream = worker.streams.find("default:r")
    assert stream is not None
    worker.wire.is_busy, worker.wire.max_payload = True, limits.MESSAGE_RESERVE_BYTES + 50
    async with asyncio.timeout(10):
        while stream.terminal is None:
            await asyncio.sleep(0.001)
    worker.wire.max_payload = 1_000_000
    worker.streams.cancel("default:r")
    worker.streams.tick()
    worker.streams.cancel("default:r")
    worker.wire.is_busy = False
    worker.streams.tick()
    (terminal,) = [chunk for chunk in worker.wire.chunks["_INBOX.r.1"] if chunk.finish_reason]
    assert terminal.error
    assert terminal.error.code is errors.Code.PAYLOAD_TOO_LARGE
    assert not len(worker.streams)
