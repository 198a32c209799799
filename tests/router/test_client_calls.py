"""Calls are answered once, whatever ends them; the memory of those for tokens is bounded, fairly between tenants."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.router.builders import card, fleet_of, free_quota
from tokenbus.protocol.bus.bus import PayloadTooLargeError
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.protocol.wire.subjects import ModelAddress
from tokenbus.router.requests.calls import client_calls
from tokenbus.router.requests.calls.client_calls import Call, ClientCalls
from tokenbus.router.requests.calls.tokenizing import TokenizeCalls
from tokenbus.router.requests.flights.ends import RequestEnds
from tokenbus.router.requests.tokenization.prompt_tokenizer import Prompt
from tokenbus.router.telemetry.metrics import RouterMetrics

FULL = client_calls.MAX_TENANT_BYTES - client_calls.CALL_BYTES


class Tokenizer:
    """Answers each prompt once it is told to."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.go = asyncio.Event()

    async def tokenize(self, prompt: Prompt, timeout_s: float) -> list[int]:
        self.prompts.append(prompt)
        await self.go.wait()
        return [1] * 100


class Replies:
    def __init__(self) -> None:
        self.sent: list[messages.TokenizeReply] = []
        self.max_bytes = 10_000

    def send(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> None:
        if len(payload) > self.max_bytes:
            raise PayloadTooLargeError("too large")
        self.sent.append(codec.Decoder(messages.TokenizeReply).decode(payload, codec.Encoding.JSON))


class Testbed:
    __test__ = False

    def __init__(self) -> None:
        self.tokenizer, self.replies, self.ends = Tokenizer(), Replies(), RequestEnds()
        fleet = fleet_of(card("w1"), card("w2"))
        self.kind = TokenizeCalls(self.tokenizer, fleet, RouterMetrics())  # type: ignore[arg-type]
        self.calls = ClientCalls(self.replies, tracing.NoopTracer(), self.ends, free_quota())  # type: ignore[arg-type]

    def start(self, request_id: str, tenant: str = "acme", num_bytes: int = 100, *, only_count: bool = False) -> None:
        body = messages.TokenizeRequest(id=request_id, prompt="x", only_count=only_count)
        address = ModelAddress("demo", tenant)
        now = time.monotonic()
        work, encoding = self.kind.check(body), codec.Encoding.JSON
        call = Call(request_id, address, body, work, "_INBOX.a.b", encoding, now, num_bytes)
        self.calls.admit_call(self.kind, call, None)


@pytest.fixture
async def bed() -> AsyncIterator[Testbed]:
    bed = Testbed()
    yield bed
    await bed.calls.shut_down()


async def answered(bed: Testbed) -> list[str]:
    bed.tokenizer.go.set()
    await bed.calls.drain()
    return [reply.id for reply in bed.replies.sent]


async def test_a_tenant_may_have_a_quarter_of_the_memory_and_not_a_byte_more(bed: Testbed) -> None:
    bed.start("all", num_bytes=FULL)
    with pytest.raises(errors.RequestError) as refused:
        bed.start("more", num_bytes=0)
    assert refused.value.error.code is errors.Code.OVERLOADED
    bed.start("theirs", "globex")
    assert await answered(bed) == ["all", "theirs"]


async def test_all_tenants_together_may_have_the_memory_and_not_a_byte_more(bed: Testbed) -> None:
    for number in range(4):
        bed.start(f"r{number}", f"t{number}", FULL)
    with pytest.raises(errors.RequestError, match="overloaded"):
        bed.start("more", "another", 0)
    assert len(await answered(bed)) == 4


async def test_an_answered_request_gives_its_memory_back(bed: Testbed) -> None:
    for _ in range(3):
        bed.start("all", num_bytes=FULL)
        await answered(bed)
    assert len(bed.replies.sent) == 3


async def test_no_two_prompts_have_the_same_place_in_the_queue_although_ids_are_the_same(bed: Testbed) -> None:
    bed.start("same")
    bed.start("same")
    assert await answered(bed) == ["same", "same"]
    assert len({prompt.key for prompt in bed.tokenizer.prompts}) == 2


async def test_a_reply_that_is_too_large_is_an_error_that_says_so(bed: Testbed) -> None:
    bed.replies.max_bytes = 200
    bed.start("ids")
    bed.start("count", only_count=True)
    assert sorted(await answered(bed)) == ["count", "ids"]
    codes = {reply.id: reply.error.code if reply.error else None for reply in bed.replies.sent}
    assert codes == {"ids": errors.Code.PAYLOAD_TOO_LARGE, "count": None}
    assert {reply.count for reply in bed.replies.sent if not reply.error} == {100}


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_router_that_stops_answers_what_is_open(bed: Testbed, has_begun: bool) -> None:
    bed.start("open")
    if has_begun:
        await asyncio.sleep(0)
    await bed.calls.shut_down()
    (reply,) = bed.replies.sent
    assert reply.error
    assert reply.error.code is errors.Code.SHUTTING_DOWN


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_cancel_ends_all_calls_with_the_id_and_each_is_answered_once(bed: Testbed, has_begun: bool) -> None:
    bed.start("same")
    bed.start("same")
    bed.start("other")
    if has_begun:
        await asyncio.sleep(0)
    assert bed.calls.cancel("acme:same", None)
    assert not bed.calls.cancel("globex:same", None)
    assert not bed.calls.cancel("acme:same", "another model")
    assert sorted(await answered(bed)) == ["other", "same", "same"]
    codes = [reply.error.code for reply in bed.replies.sent if reply.error]
    assert codes == [errors.Code.CANCELLED] * 2
    assert not bed.calls.cancel("acme:same", None)
