"""The number of open requests is limited, and draining ends them."""

import asyncio
import contextlib

import pytest

from tests.support.fed_stream import FakeTransport, stream_over
from tokenbus.gateway.admission.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.http.http_errors import OVERLOADED, SHUTTING_DOWN, ApiError
from tokenbus.protocol.wire import errors


def test_as_many_requests_are_open_as_may_be_and_not_one_more() -> None:
    limit = ConcurrencyLimit(2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(limit.admit())
        stack.enter_context(limit.admit())
        with pytest.raises(ApiError) as refused:
            stack.enter_context(limit.admit())
    assert refused.value.response == OVERLOADED
    assert (OVERLOADED.status, OVERLOADED.headers["retry-after"]) == (503, "1")
    with limit.admit():
        pass


async def test_a_draining_gateway_admits_nothing_new_and_is_drained_when_the_last_request_has_ended() -> None:
    limit = ConcurrencyLimit(2)
    with limit.admit():
        closing = asyncio.create_task(limit.drain(grace_s=60))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused, limit.admit():
            pass
        assert refused.value.response == SHUTTING_DOWN
        assert not closing.done()
    await asyncio.wait_for(closing, 60)


async def test_after_the_grace_streams_are_cancelled_and_end_with_shutting_down() -> None:
    limit, line = ConcurrencyLimit(2), FakeTransport()
    early, late = stream_over(line), stream_over(line)
    with limit.admit(), limit.track(early):
        await limit.drain(grace_s=0)
        with limit.track(late):  # its body came while the others ended
            ends = [[chunk async for chunk in stream] for stream in (early, late)]
    for (terminal,) in ends:
        assert terminal.error
        assert terminal.error.code is errors.Code.SHUTTING_DOWN
    assert line.num_cancels == 2
