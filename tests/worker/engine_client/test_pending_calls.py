"""Each call gets its own result in whatever order they come, and none stays pending."""

import asyncio

import pytest

from tokenbus.protocol.wire import errors
from tokenbus.worker.engine_client.engine_calls import PendingCalls


async def test_results_reach_their_callers_in_any_order() -> None:
    calls: PendingCalls[str] = PendingCalls()
    tickets: list[int] = []
    asking = [asyncio.create_task(calls.call(tickets.append)) for _ in range(3)]
    await asyncio.sleep(0)
    for call_id in reversed(tickets):
        calls.end(call_id, f"answer {call_id}")
    assert await asyncio.gather(*asking) == [f"answer {call_id}" for call_id in tickets]
    assert len(calls) == 0


async def test_a_rejection_and_the_end_of_the_engine_are_errors() -> None:
    calls: PendingCalls[str] = PendingCalls()
    tickets: list[int] = []
    asking = [asyncio.create_task(calls.call(tickets.append)) for _ in range(2)]
    await asyncio.sleep(0)
    calls.end(tickets[0], "", errors.make_error(errors.Code.INVALID_REQUEST))
    calls.fail_all()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert [error.error.code for error in found if isinstance(error, errors.RequestError)] == [
        errors.Code.INVALID_REQUEST,
        errors.Code.WORKER_LOST,
    ]


async def test_cancelled_calls_are_forgotten_and_late_results_are_dropped() -> None:
    calls: PendingCalls[str] = PendingCalls()
    tickets: list[int] = []
    asking = asyncio.create_task(calls.call(tickets.append))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(calls) == 0
    calls.end(tickets[0], "late")
    calls.end(99, "", errors.make_error(errors.Code.INTERNAL))


async def test_a_call_that_can_not_be_sent_is_not_pending() -> None:
    calls: PendingCalls[str] = PendingCalls()

    def fail(call_id: int) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await calls.call(fail)
    assert len(calls) == 0
