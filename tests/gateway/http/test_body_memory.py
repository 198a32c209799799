"""Large bodies have room for so many bytes together, and ordinary ones don't need any of it."""

import asyncio

import pytest

from tokenbus.gateway.http import body
from tokenbus.gateway.http.body import BodyMemory
from tokenbus.gateway.http.http_errors import OVERLOADED, ApiError

MIB = 1024 * 1024


async def test_only_bytes_beyond_a_mebibyte_count_until_the_request_ends() -> None:
    memory = BodyMemory(8 * MIB)
    with memory.holding() as small, memory.holding() as large:
        small.add(MIB)
        assert memory.held_bytes == 0
        for _ in range(3):
            large.add(MIB)
        assert memory.held_bytes == 2 * MIB
        small.add(1)
        assert memory.held_bytes == 2 * MIB + 1
    assert memory.held_bytes == 0


async def test_without_room_a_large_body_is_refused_and_an_ordinary_one_is_not() -> None:
    memory = BodyMemory(1)
    with memory.holding() as first:
        first.add(MIB + 32)
        with memory.holding() as other:
            other.add(MIB)
            with pytest.raises(ApiError) as raised:
                other.add(1)
            assert raised.value.response == OVERLOADED
        assert memory.held_bytes == 32
    assert memory.held_bytes == 0


async def test_soon_after_a_large_body_the_heap_is_returned_to_the_system_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, trimmed, times = asyncio.get_running_loop(), asyncio.Event(), []

    def trim() -> None:
        times.append(loop.time())
        loop.call_soon_threadsafe(trimmed.set)

    monkeypatch.setattr(body, "trim_heap", trim)
    monkeypatch.setattr(body, "_TRIM_DELAY_S", 0.01)
    memory = BodyMemory(8 * MIB)
    with memory.holding() as small:
        small.add(MIB)
    for _ in range(3):
        with memory.holding() as large:
            large.add(MIB + 1)
    async with asyncio.timeout(10):
        await trimmed.wait()
    assert len(times) == 1
