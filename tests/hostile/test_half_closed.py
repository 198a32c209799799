"""Clients that shut down their sending side and go on reading get their answers; those that close are noticed."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.raw_http import LIVEZ, SmallServer, Socket, cut_after, small_server
from tokenbus.protocol.http.http_server import Disconnect

KEPT = LIVEZ.replace(b"Connection: close\r\n", b"")
WAIT = KEPT.replace(b"livez", b"wait")
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
END = b"\r\n\r\nok\n"


@pytest.fixture
async def served() -> AsyncIterator[tuple[SmallServer, int]]:
    async with small_server() as served:
        yield served


async def half_closed(port: int, said: bytes) -> Socket:
    one = await Socket.open(port, said)
    one.say_no_more()
    return one


def final(answers: bytes) -> bytes:
    """Returns answers without the interim ones between them."""
    return answers.replace(INTERIM, b"")


async def test_a_client_that_shuts_down_its_sending_side_gets_its_answer_and_the_end(
    served: tuple[SmallServer, int],
) -> None:
    small, port = served
    with cut_after([await half_closed(port, WAIT)]) as (one,):
        assert await one.reader.readexactly(2 * len(INTERIM)) == 2 * INTERIM
        small.may_answer.set()
        answer = final(await one.rest())
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(END)


async def test_all_requests_that_it_has_sent_are_answered_but_half_a_one(served: tuple[SmallServer, int]) -> None:
    small, port = served
    small.may_answer.set()
    half = KEPT.replace(b"GET /livez", b"POST /read").removesuffix(b"\r\n") + b"Content-Length: 9\r\n\r\nabc"
    with cut_after([await half_closed(port, WAIT + KEPT + half)]) as (one,):
        assert final(await one.rest()).count(END) == 2
    await asyncio.wait_for(small.gone.wait(), 10)
    assert small.bodies == []


@pytest.mark.parametrize("said", [b"", b"GET /li", b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc"])
async def test_who_shuts_down_before_a_request_is_complete_is_gone(
    served: tuple[SmallServer, int], said: bytes
) -> None:
    with cut_after([await half_closed(served[1], said)]) as (one,):
        assert await one.rest() == b""


async def test_a_stream_goes_on_with_comments_between_its_events(served: tuple[SmallServer, int]) -> None:
    small, port = served
    with cut_after([await half_closed(port, KEPT.replace(b"livez", b"events"))]) as (one,):
        await one.reader.readuntil(b":\n\n")
        await one.reader.readuntil(b":\n\n")
        small.may_answer.set()
        assert (await one.rest()).endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("path", [b"hold", b"hold_events"])
async def test_a_client_that_closes_is_gone_within_a_second(served: tuple[SmallServer, int], path: bytes) -> None:
    small, port = served
    one = await Socket.open(port, KEPT.replace(b"livez", path))
    await small.until_asked(1)
    one.close()
    await asyncio.wait_for(small.gone.wait(), 1)
    assert small.disconnects == [Disconnect.GONE]


async def test_a_client_of_http_1_0_that_shuts_down_is_gone_since_it_knows_no_interim_answers(
    served: tuple[SmallServer, int],
) -> None:
    small, port = served
    with cut_after([await half_closed(port, WAIT.replace(b"wait", b"hold").replace(b"1.1", b"1.0"))]) as (one,):
        assert await one.rest() == b""
    await asyncio.wait_for(small.gone.wait(), 1)
