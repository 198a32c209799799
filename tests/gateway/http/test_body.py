"""A gateway reads bodies up to a limit of size and time."""

import asyncio
import contextlib
import functools
import gc
import gzip
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from tokenbus.gateway.http import body
from tokenbus.gateway.http.body import BodyMemory, HeldBody
from tokenbus.gateway.http.http_errors import (
    BODY_TIMEOUT,
    BROKEN_COMPRESSION,
    ApiError,
    too_large,
    unsupported_encoding,
)

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    " GZIP": gzip.compress,
    "deflate": zlib.compress,
    "zstd": body.zstd.compress,
}
JSON = [(b"content-type", b"application/json")]


def request_of(*parts: bytes, is_whole: bool = True, encoding: str = "") -> Request:
    """A request whose body comes in these parts; where it is not whole nothing comes after them."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = not is_whole

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    return Request({"type": "http", "headers": [*JSON, (b"content-encoding", encoding.encode())]}, receive)


@pytest.mark.parametrize("num_bytes", [b"16777317", b"18446744073709551616", b"9" * 20])
async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(num_bytes: bytes) -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing is read")

    request = Request({"type": "http", "headers": [*JSON, (b"content-length", num_bytes)]}, receive)
    assert await response_to(request, 100) == too_large(100)


async def response_to(request: Request, limit_bytes: int) -> object:
    with pytest.raises(ApiError) as raised:
        await body.read(request, limit_bytes, HeldBody(BodyMemory(1 << 30)))
    return raised.value.response


@pytest.mark.parametrize("name", [b"origin", b"sec-fetch-site"])
async def test_a_body_may_be_of_any_type_where_that_is_allowed_and_no_web_page_sends_it(name: bytes) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    def request(*headers: tuple[bytes, bytes]) -> Request:
        return Request({"type": "http", "headers": [(b"content-type", b"text/plain"), *headers]}, receive)

    held = HeldBody(BodyMemory(1 << 30))
    assert await body.read(request(), 5, held, takes_any_type=True) == b"{}"
    for refused, takes_any_type in ((request(), False), (request((name, b"null")), True)):
        with pytest.raises(ApiError) as raised:
            await body.read(refused, 5, held, takes_any_type=takes_any_type)
        assert raised.value.response.status == 415


async def test_a_body_may_have_as_many_bytes_as_the_limit_and_not_one_more() -> None:
    assert await body.read(request_of(b"1234", b"5"), 5, HeldBody(BodyMemory(5))) == b"12345"
    assert await response_to(request_of(b"1234", b"56"), 5) == too_large(5)


@pytest.mark.parametrize("encoding", PACKERS)
async def test_a_compressed_body_is_expanded(encoding: str) -> None:
    packed = PACKERS[encoding](b"12345" * 40_000)
    request = request_of(packed[:7], packed[7:], encoding=encoding)
    assert await body.read(request, 200_000, HeldBody(BodyMemory(1 << 30))) == b"12345" * 40_000


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_compressed_body_may_have_as_many_bytes_as_any_other_and_is_expanded_no_further(encoding: str) -> None:
    packed = PACKERS[encoding](bytes(100_000_000))
    held = HeldBody(BodyMemory(1 << 30))
    with pytest.raises(ApiError) as raised:
        await body.read(request_of(packed, encoding=encoding), 3_000_000, held)
    assert raised.value.response == too_large(3_000_000)
    assert held.counted_bytes <= 2_000_000


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_others_have_turns_while_a_body_is_expanded(encoding: str) -> None:
    packed = PACKERS[encoding](bytes(4_000_000))
    reading = asyncio.create_task(
        body.read(request_of(packed, encoding=encoding), 4_000_000, HeldBody(BodyMemory(1 << 30)))
    )
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(reading.result()) == 4_000_000
    assert turns >= 60


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_what_is_not_compressed_as_it_says_is_refused(encoding: str) -> None:
    packed = PACKERS[encoding](b"{}")
    for parts in ([b"{}"], [packed[:-1]], [packed + b"x"], [packed, b"x"], [b""]):
        assert await response_to(request_of(*parts, encoding=encoding), 100) == BROKEN_COMPRESSION


async def test_zstd_that_would_need_much_memory_to_expand_is_refused() -> None:
    for log, is_served in ((23, True), (24, False)):
        window = {body.zstd.CompressionParameter.window_log: log}
        packer = body.zstd.ZstdCompressor(options=window)
        packed = packer.compress(b"{}") + packer.flush()  # without its size, the window is as large as it may be
        request = request_of(packed, encoding="zstd")
        if is_served:
            assert await body.read(request, 100, HeldBody(BodyMemory(1 << 30))) == b"{}"
        else:
            assert await response_to(request, 100) == BROKEN_COMPRESSION


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip"])
async def test_another_encoding_is_refused_by_name(encoding: str) -> None:
    assert await response_to(request_of(b"{}", encoding=encoding), 100) == unsupported_encoding(encoding)


async def test_a_body_without_an_end_is_refused_before_it_ends() -> None:
    endless = request_of(*[b"x" * 1_000_000] * 20, is_whole=False)
    assert await response_to(endless, 5) == too_large(5)


async def test_a_body_that_comes_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.01)
    assert await response_to(request_of(b"{", is_whole=False), 100) == BODY_TIMEOUT


async def test_a_body_that_is_large_or_may_become_so_is_parsed_in_a_thread() -> None:
    parser, loop, is_parsing = body.LargeBodyParser(), asyncio.get_running_loop(), asyncio.Event()
    may_end = threading.Event()

    def parse() -> int:
        loop.call_soon_threadsafe(is_parsing.set)
        assert may_end.wait(10)
        return threading.get_ident()

    parsing = asyncio.create_task(parser.parse(parse, 256 * 1024 + 1))
    await asyncio.wait_for(is_parsing.wait(), 10)
    assert await parser.parse(threading.get_ident, 256 * 1024) == threading.get_ident()
    may_end.set()
    assert await parser.parse(threading.get_ident, 10, expands=True) != threading.get_ident()
    assert await parsing != threading.get_ident()


async def test_large_bodies_are_parsed_one_at_a_time_and_one_that_fails_disturbs_no_other() -> None:
    parser = body.LargeBodyParser()
    running: list[int] = []

    def parse(number: int) -> int:
        assert not running
        assert not gc.isenabled()
        running.append(number)
        time.sleep(0.001)
        running.remove(number)
        if number == 2:
            raise ValueError("number 2")
        return number

    calls = [parser.parse(functools.partial(parse, number), 1 << 20) for number in range(5)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [one if isinstance(one, int) else str(one) for one in results] == [0, 1, "number 2", 3, 4]
    assert gc.isenabled()


async def test_nothing_of_a_request_that_failed_waits_for_a_collection_of_garbage() -> None:
    async def never() -> dict[str, Any]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def fail(payload: set[int]) -> None:
        raise ApiError(BODY_TIMEOUT)

    payload = {1}
    collected = weakref.ref(payload)
    gc.disable()
    try:
        with contextlib.suppress(ApiError):  # pytest would keep it
            await body.cancel_on_disconnect(never, fail(payload))
        del payload
        assert collected() is None
    finally:
        gc.enable()
