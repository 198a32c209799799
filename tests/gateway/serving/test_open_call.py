"""A call ends with its reply, or with the gateway that shuts down."""

import asyncio

import pytest

from tokenbus.gateway.serving.answering import OpenCall
from tokenbus.protocol.wire import errors

STOPS = errors.make_error(errors.Code.SHUTTING_DOWN)


async def test_a_call_returns_what_is_awaited_or_raises_it() -> None:
    assert await OpenCall().run(asyncio.sleep(0, "reply")) == "reply"

    async def refuse() -> None:
        raise errors.request_error(errors.Code.OVERLOADED)

    with pytest.raises(errors.RequestError, match="overloaded"):
        await OpenCall().run(refuse())


async def test_a_call_that_is_failed_ends_at_once_and_awaits_nothing_more() -> None:
    call, never = OpenCall(), asyncio.Event()
    running = asyncio.create_task(call.run(never.wait()))
    await asyncio.sleep(0)
    call.cancel()
    call.fail(STOPS)
    call.fail(STOPS)
    with pytest.raises(errors.RequestError) as failed:
        await running
    assert failed.value.error is STOPS


async def test_a_reply_that_came_before_the_failure_counts() -> None:
    call = OpenCall()

    async def reply() -> str:
        call.fail(STOPS)
        return "reply"

    assert await call.run(reply()) == "reply"
