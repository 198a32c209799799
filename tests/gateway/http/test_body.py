"""A gateway reads bodies up to a limit of size and time."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from tokenbus.gateway.http import body
from tokenbus.gateway.http.body_memory import BodyMemory, HeldBody
from tokenbus.gateway.http.http_errors import BODY_TIMEOUT, ApiError, too_large

JSON = [(b"content-type", b"application/json")]


def request_of(*parts: bytes, is_whole: bool = True) -> Request:
    """A request whose body comes in these parts; where it is not whole nothing comes after them."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = not is_whole

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    return Request({"type": "http", "headers": JSON}, receive)


async def response_to(request: Request, limit_bytes: int) -> object:
    with pytest.raises(ApiError) as raised:
        await body.read(request, limit_bytes, HeldBody(BodyMemory(1 << 30)))
    return raised.value.response


async def test_a_body_may_have_as_many_bytes_as_the_limit_and_not_one_more() -> None:
    assert await body.read(request_of(b"1234", b"5"), 5, HeldBody(BodyMemory(5))) == b"12345"
    assert await response_to(request_of(b"1234", b"56"), 5) == too_large(5)


async def test_a_body_without_an_end_is_refused_before_it_ends() -> None:
    endless = request_of(*[b"x" * 1_000_000] * 20, is_whole=False)
    assert await response_to(endless, 5) == too_large(5)


async def test_a_body_that_comes_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.01)
    assert await response_to(request_of(b"{", is_whole=False), 100) == BODY_TIMEOUT
