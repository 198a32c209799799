"""Requests that are larger than the broker's messages reach a worker, also the second one of a stream."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import page_client
from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX, RawClient, check_stream
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import codec, messages

SIM = ("--engine", "sim", "--sim-speedup", "1000", "--context-length", "262144", "--kv-tokens", "600000")
NUM_TOKENS = 200_000
rng = random.Random(7)
TOKEN_IDS = [rng.randrange(300, 1_000) for _ in range(NUM_TOKENS)]
IN_PARTS = TOKEN_IDS[:50_000]
"""More than one message of 64 KB holds, in every encoding and between all processes."""
SLOW = ("--engine", "sim", "--sim-speedup", "10", *SIM[4:])
"""Fast enough to compute the prompt in a test, and slow enough for tokens to come while parts do."""


@pytest.fixture
async def system(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[System]:
    """A broker that allows a mebibyte in a message, like most, or much less."""
    config = tmp_path / "nats.conf"
    config.write_text(f"max_payload: {request.param}\n")
    system = await System.start(tmp_path, config)
    yield system
    await system.stop()


small_messages = pytest.mark.parametrize("system", ["64KB"], indirect=True)
"""In a mebibyte a run of these tokens would fit."""


async def started(system: System, *workers: str, routers: int = 1, flags: tuple[str, ...] = SIM) -> RawClient:
    for number in range(routers):
        system.router(f"router-{number}")
    for name in workers:
        system.worker(name, *flags, model="dynamo")
    bare = await system.connect()
    await until_ready(bare, len(workers))
    for number in range(routers):
        await system.until_logged(f"router-{number}", "router_ready")
    return bare


async def finished(stream: AsyncIterator[messages.Chunk]) -> list[messages.Chunk]:
    async with asyncio.timeout(90):
        return [chunk async for chunk in stream]


def prompt_tokens(chunks: list[messages.Chunk]) -> int:
    usage = chunks[-1].usage
    assert usage, chunks[-1]
    return usage.prompt_tokens


@pytest.mark.parametrize(
    ("system", "encoding"),
    [
        ("64KB", codec.Encoding.MSGPACK),
        ("1MB", codec.Encoding.JSON),
        pytest.param("64KB", codec.Encoding.JSON, marks=pytest.mark.long),
        pytest.param("1MB", codec.Encoding.MSGPACK, marks=pytest.mark.long),
    ],
    indirect=["system"],
)
async def test_a_session_of_200_000_tokens_and_a_body_of_8_mb_reach_a_worker(
    system: System, encoding: codec.Encoding
) -> None:
    await started(system, "worker", routers=2)
    fields: dict[str, Any] = {"token_ids": TOKEN_IDS, "max_tokens": 8, "seed": 1, "return_token_ids": True}
    async with await WireClient.connect(system.url, encoding=encoding) as client:
        whole = await finished(client.generate("demo", **fields))
        assert prompt_tokens(whole) == NUM_TOKENS
        assert whole[-1].finish_reason is messages.FinishReason.LENGTH
        once_more = await finished(client.generate("demo", **fields, stream=False))
        assert once_more[-1].text == "".join(chunk.text for chunk in whole)
        chat = [{"role": "user", "content": "x"}, {"role": "user", "content": "y" * 199_000}]
        assert prompt_tokens(await finished(client.generate("demo", messages=chat, max_tokens=1))) > 199_000
        # most of these 8 MB are not part of the prompt
        arguments = {"padding": "z" * 8_000_000}
        padded = client.generate("demo", messages=chat[:1], chat_template_kwargs=arguments, max_tokens=1)
        assert prompt_tokens(await finished(padded)) < 100
        sampled = [token_id for chunk in whole for token_id in chunk.token_ids or []]
        resume_from = messages.ResumeFrom(token_ids=sampled[:3])
        rest = await finished(client.generate("demo", **fields, resume_from=resume_from))
        assert [token_id for chunk in rest for token_id in chunk.token_ids or []] == sampled[3:]


@small_messages
async def test_the_client_on_the_page_of_the_wire_sends_a_request_of_any_size(system: System) -> None:
    bare = await started(system, "worker", routers=2)
    subject = f"{PREFIX}.generate.demo"
    for count in (1, 20_000, NUM_TOKENS):
        request = {"id": f"r{count}", "token_ids": TOKEN_IDS[:count], "max_tokens": 3}
        answer = await page_client.submit(bare.nats, subject, request)
        await answer.terminal()
        check_stream(answer, f"r{count}")
        assert answer.terminals[0]["usage"]["prompt_tokens"] == count
    with pytest.raises(RuntimeError, match="payload_too_large"):
        await page_client.submit(bare.nats, subject, {"prompt": "x" * (17 << 20)})


@small_messages
async def test_a_stream_with_a_prompt_in_several_parts_goes_on_when_its_worker_dies(system: System) -> None:
    bare = await started(system, "worker-0", "worker-1", flags=SLOW)
    async with await WireClient.connect(system.url, encoding=codec.Encoding.MSGPACK) as client:
        answer = await submitted_long(client)
        system.kill(await worker_of(bare, system, 2))
        check_long(await answer.end())


@small_messages
async def test_a_stream_with_a_prompt_in_several_parts_is_taken_from_a_worker_that_leaves(system: System) -> None:
    bare = await started(system, "worker-0", "worker-1", flags=(*SLOW, "--grace-s", "0"))
    async with await WireClient.connect(system.url, encoding=codec.Encoding.MSGPACK) as client:
        answer = await submitted_long(client)
        leaving = await worker_of(bare, system, 2)
        system.signal(leaving, signal.SIGTERM)
        assert await system.wait(leaving) == 0
        check_long(await answer.end())


@small_messages
@pytest.mark.long
async def test_a_stream_with_a_prompt_in_several_parts_gets_another_guardian_that_continues_it(
    system: System,
) -> None:
    bare = await started(system, "worker-0", "worker-1", flags=SLOW)
    async with await WireClient.connect(system.url, encoding=codec.Encoding.MSGPACK) as client:
        answer = await submitted_long(client, 4_000)
        system.router("router-1")
        await system.until_logged("router-1", "router_ready")
        system.kill("router-0")
        named = await worker_of(bare, system, 2)
        await system.until_logged(named, "guardian_changed")
        await asyncio.sleep(1.5)  # the new guardian closes the gap of the offer with a snapshot
        system.kill(named)
        check_long(await answer.end(), 4_000)
    assert not [line for line in system.log("router-1") if line["event"] == "guard_refused"]


@small_messages
@pytest.mark.long
async def test_a_router_that_stops_hands_over_a_large_request_that_waits(system: System) -> None:
    await started(system, "worker-0", flags=(*SLOW, "--max-num-seqs", "1"))
    async with await WireClient.connect(system.url, encoding=codec.Encoding.MSGPACK) as client:
        busy = await submitted_long(client, 100_000)  # until it is cancelled, however slow this machine is
        waiting = [LongAnswer(client, 10) for _ in range(3)]
        async with asyncio.timeout(60):
            while len([line for line in system.log("router-0") if line["event"] == "request_received"]) < 4:
                await asyncio.sleep(0.05)
        system.router("router-1")
        await system.until_logged("router-1", "router_ready")
        system.signal("router-0", signal.SIGTERM)
        assert await system.wait("router-0") == 0
        busy.cancel()
        last = (await busy.end())[-1]
        assert (last.finish_reason, last.attempt) == ("cancelled", 1)
        for one in waiting:
            check_long(await one.end(), 10, attempt=(await one.end())[-1].attempt)
    adopted = [line for line in system.log("router-1") if line["event"] == "request_adopted"]
    assert None in [line["worker_id"] for line in adopted]


class LongAnswer:
    """A stream behind a long prompt, read in a task."""

    def __init__(self, client: WireClient, max_tokens: int) -> None:
        self.chunks: list[messages.Chunk] = []
        self.spoken = asyncio.Event()
        fields: dict[str, Any] = {"token_ids": IN_PARTS, "max_tokens": max_tokens, "ignore_eos": True}
        self._stream = client.generate("demo", **fields, resume=False)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for chunk in self._stream:
            self.chunks.append(chunk)
            if chunk.tokens:
                self.spoken.set()

    def cancel(self) -> None:
        self._stream.cancel()

    async def end(self) -> list[messages.Chunk]:
        async with asyncio.timeout(90):
            await self._task
        return self.chunks


async def submitted_long(client: WireClient, max_tokens: int = 1_000) -> LongAnswer:
    answer = LongAnswer(client, max_tokens)
    async with asyncio.timeout(60):
        await answer.spoken.wait()
    return answer


def check_long(chunks: list[messages.Chunk], max_tokens: int = 1_000, attempt: int = 2) -> None:
    assert chunks[-1].error is messages.UNSET, chunks[-1]
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == max_tokens
    assert sum(chunk.tokens for chunk in chunks) == max_tokens
    assert chunks[-1].attempt == attempt


async def worker_of(bare: RawClient, system: System, count: int) -> str:
    """Returns the worker that has a request."""
    async with asyncio.timeout(60):
        while True:
            for number in range(count):
                if [line for line in system.log(f"worker-{number}") if line["event"] == "request_started"]:
                    return f"worker-{number}"
            await asyncio.sleep(0.02)
