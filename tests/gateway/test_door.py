"""How many requests are open, and how they end when the gateway is left."""

import asyncio
import contextlib

import pytest

from tests.support.streams import Line, stream_over
from tokenbus.gateway.door import Door
from tokenbus.gateway.openai.failures import FULL, LEAVING, FailedError
from tokenbus.protocol.wire import errors


def test_as_many_requests_are_open_as_may_be_and_not_one_more() -> None:
    door = Door(2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(door.entered())
        stack.enter_context(door.entered())
        with pytest.raises(FailedError) as refused:
            stack.enter_context(door.entered())
    assert refused.value.failure == FULL
    assert (FULL.status, FULL.headers["retry-after"]) == (503, "1")
    with door.entered():
        pass


async def test_a_closed_door_takes_nothing_new_and_is_closed_when_the_last_has_left() -> None:
    door = Door(2)
    with door.entered():
        closing = asyncio.create_task(door.close(grace_s=60))
        await asyncio.sleep(0)
        with pytest.raises(FailedError) as refused, door.entered():
            pass
        assert refused.value.failure == LEAVING
        assert not closing.done()
    await asyncio.wait_for(closing, 60)


async def test_after_the_grace_streams_are_cancelled_and_end_with_shutting_down() -> None:
    door, line = Door(2), Line()
    early, late = stream_over(line), stream_over(line)
    with door.entered(), door.holding(early):
        await door.close(grace_s=0)
        with door.holding(late):  # its body came while the others ended
            ends = [[chunk async for chunk in stream] for stream in (early, late)]
    for (terminal,) in ends:
        assert terminal.error
        assert terminal.error.code is errors.Code.SHUTTING_DOWN
    assert line.num_cancels == 2
