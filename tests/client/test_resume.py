"""A stream outlives its worker: its client has it continued elsewhere, and its reader sees one text with one end."""

import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.continuation import MAX_RESUBMITS
from tokenbus.protocol.wire import codec, errors, messages

Code, FinishReason = errors.Code, messages.FinishReason
SCHEME = "xxh3-64:f"
PIECES = ("Hé", "", "llo", " wörld", "", "!")
"""Text by token; a token without one is half a character, or might begin a stop string."""
LOST = errors.make_error(Code.WORKER_LOST)
SILENT_S = 12.2
"""Time after which a stream that has begun is given up: 10 s of silence and two resyncs."""


class Fleet:
    """The other side of one stream: continues a completion behind the tokens that a request names."""

    def __init__(
        self, pieces: tuple[str, ...] = PIECES, *, scheme: str | None = SCHEME, resume: bool = True, **fields: object
    ) -> None:
        self.pieces = pieces
        self.now = 0.0
        self.requests: list[messages.GenerateRequest] = []
        self.cancelled: list[str] = []
        self.num_forgotten = 0
        self.refusal: errors.Error | None = None
        """The reason for which nothing can be sent."""
        self.repeats: errors.Error | None = None
        """The error that is published again after each resync."""
        self._scheme = scheme
        request = messages.GenerateRequest(id="r", prompt="hi", **fields)  # type: ignore[arg-type]
        self.stream = ChunkStream(request, codec.Encoding.JSON, self, self.now, resume=resume)
        self.stream.submit()

    def submit(self, stream: ChunkStream, request: messages.GenerateRequest) -> None:
        self.requests.append(request)
        self.at = len(request.resume_from.token_ids) if request.resume_from else 0
        self.attempt = 0
        if self.refusal is not None:
            stream.refuse(self.refusal, self.now)

    def send_cancel(self, stream: ChunkStream) -> None:
        self.cancelled.append(stream.request_id)

    def send_resync(self, stream: ChunkStream, offset: int, prompt_offset: int | None = None) -> None:
        if self.repeats is not None:  # as a router does that has answered the request
            stream.feed_resync(codec.encode(messages.ResyncReply(found=True), codec.Encoding.JSON), self.now)
            self.fail(self.repeats)

    def forget(self, stream: ChunkStream) -> None:
        self.num_forgotten += 1

    @property
    def ids(self) -> list[str | None]:
        return [request.id for request in self.requests]

    def feed(self, **fields: object) -> None:
        attempt = fields.pop("attempt", self.attempt)
        chunk = messages.Chunk(id=str(self.ids[-1]), attempt=attempt, **fields)  # type: ignore[arg-type]
        self.stream.feed(codec.encode(chunk, codec.Encoding.JSON), self.now)

    def begin(self) -> None:
        """Publishes the head of an attempt."""
        self.attempt += 1
        self.feed(**self._place(), worker_id="w", model="m", created=1, hash_scheme=codec.unset_if_none(self._scheme))

    def speak(self, num_tokens: int = 1, **fields: object) -> None:
        """Publishes the next tokens, one chunk for all of them."""
        place, stop = self._place(), min(self.at + num_tokens, len(self.pieces))
        ids = [100 + number for number in range(self.at, stop)]
        text, self.at = "".join(self.pieces[self.at : stop]), stop
        shown = {"token_ids": ids} if self.requests[-1].return_token_ids else {}
        self.feed(**place, tokens=len(ids), text=text, **shown | fields)

    def finish(self) -> None:
        self.speak(len(self.pieces), finish_reason=FinishReason.STOP, worker_id="w")

    def fail(self, error: errors.Error) -> None:
        """Publishes a router's terminal."""
        self.feed(finish_reason=FinishReason.ERROR, error=error, worker_id=None)

    def contradict(self) -> None:
        self.feed(offset=self.at, text_offset=10_000, tokens=1, text="x")

    def start_over(self) -> None:
        """Generates the completion anew, in other words."""
        self.feed(attempt=self.attempt + 1, tokens=1, text="x")

    def be_silent(self, seconds: float = SILENT_S) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            self.stream.tick(self.now)

    def vanish(self) -> None:
        """Says nothing any more until the stream is given up."""
        before, until = len(self.requests), self.now + SILENT_S
        while self.now < until and len(self.requests) == before:
            self.be_silent(0.1)

    async def rest(self) -> list[messages.Chunk]:
        async with asyncio.timeout(60):
            return [chunk async for chunk in self.stream]

    def _place(self) -> dict[str, object]:
        return {"offset": self.at, "text_offset": len("".join(self.pieces[: self.at]).encode())}


def begun(num_tokens: int = 3, **fields: object) -> Fleet:
    """A stream of which some tokens have come."""
    fleet = Fleet(**fields)  # type: ignore[arg-type]
    fleet.begin()
    for _ in range(num_tokens):
        fleet.speak()
    return fleet


def check(fleet: Fleet, chunks: list[messages.Chunk]) -> None:
    """Asserts that the chunks are the whole completion, without a gap, with one terminal."""
    num_tokens = text_bytes = 0
    for chunk in chunks:
        if chunk.tokens or chunk.text:
            assert (chunk.offset, chunk.text_offset) == (num_tokens, text_bytes)
        num_tokens += chunk.tokens
        text_bytes += len(chunk.text.encode())
    assert "".join(chunk.text for chunk in chunks) == "".join(fleet.pieces)
    assert num_tokens == len(fleet.pieces)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.STOP]
    assert chunks[-1].finish_reason is FinishReason.STOP


LOSSES = {
    "a router's terminal": lambda fleet: fleet.fail(LOST),
    "a worker's terminal": lambda fleet: fleet.speak(finish_reason=FinishReason.ERROR, error=LOST, worker_id="w"),
    "a contradiction": Fleet.contradict,
    "another text": Fleet.start_over,
    "silence": Fleet.vanish,
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_stream_whose_worker_is_lost_goes_on_behind_its_last_token(loss: str) -> None:
    fleet = begun(3, temperature=0.5)
    LOSSES[loss](fleet)
    first, second = fleet.requests
    assert second.resume_from == messages.ResumeFrom(token_ids=[100, 101, 102], hash_scheme=SCHEME)
    assert codec.replace(second, id=first.id, resume_from=None) == first
    assert fleet.cancelled == ["r"]
    assert fleet.num_forgotten == 1
    assert fleet.stream.request_id == second.id != "r"
    fleet.begin()
    fleet.finish()
    check(fleet, await fleet.rest())


@given(data=st.data(), pieces=st.lists(st.text(max_size=3), min_size=1, max_size=12).map(tuple), asks=st.booleans())
@settings(max_examples=200)
async def test_wherever_workers_are_lost_the_reader_gets_the_undisturbed_text(
    data: st.DataObject, pieces: tuple[str, ...], asks: bool
) -> None:
    fleet = Fleet(pieces, return_token_ids=asks or None)
    num_lost = 0  # since the last new token
    for _ in range(data.draw(st.integers(0, 10))):
        for _ in range(data.draw(st.integers(0, 2))):
            fleet.begin()
        if spoken := data.draw(st.integers(0, min(3, len(pieces) - 1 - fleet.at))):
            fleet.speak(spoken)
            num_lost = 0
        has_scheme = fleet.at == 0 or any(request.resume_from for request in fleet.requests) or fleet.attempt > 0
        losses = [name for name in LOSSES if fleet.at or name not in ("a contradiction", "another text")]
        if has_scheme and num_lost < MAX_RESUBMITS and data.draw(st.booleans()):
            LOSSES[data.draw(st.sampled_from(losses))](fleet)
            num_lost += 1
    fleet.begin()
    fleet.finish()
    chunks = await fleet.rest()
    check(fleet, chunks)
    shown = [token_id for chunk in chunks for token_id in chunk.token_ids or []]
    assert shown == ([100 + number for number in range(len(pieces))] if asks else [])
    assert len(set(fleet.ids)) == len(fleet.ids)
    assert fleet.cancelled == fleet.ids[:-1]


async def test_a_stream_asks_for_token_ids_and_hides_them_from_a_user_who_did_not() -> None:
    for asks in (None, False):
        fleet = begun(3, return_token_ids=asks)
        assert fleet.requests[0].return_token_ids
        fleet.finish()
        assert {chunk.token_ids for chunk in await fleet.rest()} == {UNSET}
    assert begun(0, stream=False).requests[0].return_token_ids is None
    assert begun(0, resume=False).requests[0].return_token_ids is None


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("loss", ["a router's terminal", "silence"])
async def test_a_request_of_which_no_token_has_come_begins_anew(loss: str, stream: bool) -> None:
    fleet = Fleet(stream=stream)
    if stream:
        fleet.begin()
    LOSSES[loss](fleet)
    first, second = fleet.requests
    assert codec.replace(second, id=first.id) == first
    fleet.finish()
    check(fleet, await fleet.rest())


async def test_a_request_is_submitted_again_three_times_in_a_row_and_a_new_token_resets_the_count() -> None:
    fleet = begun(1)
    for _ in range(MAX_RESUBMITS):
        fleet.fail(LOST)
    fleet.begin()
    fleet.speak()
    for number in range(MAX_RESUBMITS):
        fleet.fail(errors.make_error(Code.WORKER_LOST, f"loss {number}"))
    assert len(fleet.requests) == 1 + 2 * MAX_RESUBMITS
    fleet.fail(errors.make_error(Code.WORKER_LOST, "the last loss"))
    *_, terminal = await fleet.rest()
    assert terminal.error == errors.make_error(Code.WORKER_LOST, "loss 0")
    assert len(fleet.requests) == 1 + 2 * MAX_RESUBMITS


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"resume": False}, {}),
        ({"scheme": None}, {}),
        ({}, {"token_ids": UNSET}),
        ({}, {"token_ids": [1, 2]}),
        ({}, {"token_ids": [-1]}),
        ({}, {"token_ids": [2**32]}),
    ],
    ids=["switched off", "no scheme", "no ids", "too many ids", "a negative id", "an id too large"],
)
async def test_a_stream_that_cannot_be_continued_ends_in_the_terminal_that_came(
    fields: dict[str, object], shown: dict[str, object]
) -> None:
    fleet = begun(1, **fields)
    fleet.speak(**shown)
    usage = messages.Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3, cached_tokens=0)
    fleet.feed(finish_reason=FinishReason.ERROR, error=LOST, worker_id=None, usage=usage)
    *_, terminal = await fleet.rest()
    assert (terminal.error, terminal.usage, terminal.id) == (LOST, usage, "r")
    assert len(fleet.requests) == 1


@pytest.mark.parametrize("code", [Code.UNSUPPORTED, Code.INVALID_REQUEST, Code.MODEL_NOT_FOUND])
async def test_a_stream_whose_continuation_is_refused_ends_in_its_own_loss_with_the_reason(code: Code) -> None:
    fleet = begun()
    fleet.fail(LOST)
    fleet.fail(errors.make_error(code, "not here", param="resume_from"))
    *_, terminal = await fleet.rest()
    assert terminal.error == errors.make_error(
        Code.WORKER_LOST, f"{LOST.message}; no other worker continues it: not here"
    )
    assert len(fleet.requests) == 2


async def test_a_continuation_that_cannot_be_sent_ends_the_stream_in_its_own_loss() -> None:
    fleet = begun()
    fleet.refusal = errors.make_error(Code.PAYLOAD_TOO_LARGE)
    fleet.fail(LOST)
    *_, terminal = await fleet.rest()
    assert terminal.error
    assert terminal.error.code is Code.WORKER_LOST
    assert re.search("larger than the limit", terminal.error.message)


async def test_a_continuation_that_is_refused_for_now_is_tried_again_after_a_while() -> None:
    fleet = begun()
    fleet.refusal = errors.make_error(Code.NO_WORKER, "no router listens")
    fleet.fail(LOST)
    assert len(fleet.requests) == 2
    fleet.be_silent(5.2)
    assert len(fleet.requests) == 3
    fleet.refusal = None
    fleet.be_silent(5.2)
    fleet.begin()
    fleet.finish()
    check(fleet, await fleet.rest())


async def test_a_router_that_repeats_its_refusal_does_not_put_off_the_next_try() -> None:
    fleet = begun()
    fleet.fail(LOST)
    fleet.repeats = errors.make_error(Code.NO_WORKER, "nothing serves it now")
    fleet.fail(fleet.repeats)
    fleet.be_silent(5.2)
    assert len(fleet.requests) == 3
    fleet.begin()
    fleet.finish()
    check(fleet, await fleet.rest())


async def test_a_continuation_that_fails_after_its_head_is_tried_again_as_soon_as_a_refused_one() -> None:
    fleet = begun()
    fleet.fail(LOST)
    fleet.begin()
    fleet.fail(errors.make_error(Code.ENGINE_POISONED))
    assert len(fleet.requests) == 2
    fleet.be_silent(5.2)
    assert len(fleet.requests) == 3
    fleet.begin()
    fleet.finish()
    check(fleet, await fleet.rest())


async def test_a_continuation_that_is_refused_every_time_ends_the_stream_in_its_own_loss() -> None:
    fleet = begun()
    fleet.refusal = errors.make_error(Code.NO_WORKER, "no router listens")
    fleet.fail(LOST)
    fleet.be_silent(5.2 * MAX_RESUBMITS)
    *_, terminal = await fleet.rest()
    assert terminal.error
    assert terminal.error.code is Code.WORKER_LOST
    assert terminal.error.message.endswith("no router listens")
    assert len(fleet.requests) == 1 + MAX_RESUBMITS


@pytest.mark.parametrize("code", [Code.DEADLINE_EXCEEDED, Code.REQUEST_CRASHES_ENGINE])
async def test_an_error_that_says_more_than_the_loss_ends_a_continued_stream(code: Code) -> None:
    fleet = begun()
    fleet.fail(LOST)
    fleet.fail(errors.make_error(code))
    *_, terminal = await fleet.rest()
    assert terminal.error == errors.make_error(code)


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_cancelled_stream_that_is_lost_ends_as_cancelled_and_is_not_continued(loss: str) -> None:
    fleet = begun()
    fleet.stream.cancel()
    LOSSES[loss](fleet)
    assert [chunk.finish_reason for chunk in await fleet.rest() if chunk.finish_reason] == [FinishReason.CANCELLED]
    assert len(fleet.requests) == 1


async def test_a_stream_cancelled_while_nobody_has_it_ends_as_cancelled() -> None:
    fleet = begun()
    fleet.refusal = errors.make_error(Code.NO_WORKER)
    fleet.fail(LOST)
    fleet.stream.cancel()
    fleet.be_silent(5.2)
    assert [chunk.finish_reason for chunk in await fleet.rest() if chunk.finish_reason] == [FinishReason.CANCELLED]
    assert len(fleet.requests) == 2


async def test_a_continuation_has_what_is_left_of_the_time_and_none_is_made_without_any() -> None:
    fleet = begun(timeout_ms=20_000.0)
    fleet.be_silent()
    assert 7_000 < (fleet.requests[1].timeout_ms or 0) < 8_000
    fleet.begin()
    fleet.speak()
    fleet.be_silent()
    *_, terminal = await fleet.rest()
    assert terminal.error == errors.make_error(Code.DEADLINE_EXCEEDED)
    assert len(fleet.requests) == 2


async def test_the_loss_of_an_earlier_attempt_continues_nothing() -> None:
    fleet = begun()
    fleet.begin()
    fleet.feed(attempt=1, finish_reason=FinishReason.ERROR, error=LOST)
    fleet.finish()
    check(fleet, await fleet.rest())
    assert len(fleet.requests) == 1


async def test_a_stream_that_its_user_continues_begins_behind_the_given_tokens_and_goes_on_like_any() -> None:
    fleet = Fleet(resume_from=messages.ResumeFrom(token_ids=[100, 101], hash_scheme=SCHEME))
    fleet.fail(LOST)
    assert fleet.requests[1].resume_from == fleet.requests[0].resume_from
    fleet.begin()
    fleet.speak()
    fleet.fail(LOST)
    assert fleet.requests[2].resume_from == messages.ResumeFrom(token_ids=[100, 101, 102], hash_scheme=SCHEME)
    fleet.begin()
    fleet.finish()
    chunks = await fleet.rest()
    assert "".join(chunk.text for chunk in chunks) == "".join(PIECES[2:])
    assert [chunk.offset for chunk in chunks if chunk.tokens] == [2, 3]
