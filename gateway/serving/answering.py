"""Answers a parsed request: a generation as a stream of events or in one piece, or a call with its one reply."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from msgspec import UNSET

from tokenbus.client.wire.choices import Answers
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.admission.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.response_writer import ResponseWriter
from tokenbus.gateway.serving import conversation
from tokenbus.gateway.serving.answer_events import AnswerEventReader
from tokenbus.gateway.serving.dialect import (
    AnswerEncoder,
    ApiEndpoint,
    ParsedCall,
    ParsedGeneration,
    PromptShowingEncoder,
    RecordingEncoder,
    ResponseHead,
)
from tokenbus.gateway.serving.request_log import RequestLog
from tokenbus.gateway.storage.records import TenantRecords
from tokenbus.protocol import tasks
from tokenbus.protocol.wire import block_hash, errors, messages, rate_limits
from tokenbus.protocol.wire.messages import GenerateRequest

STATUS_HOLD_S = 10.0
"""A streamed response starts with its first event, or after this time; until then an error can still set the status.
After that it is kept alive whenever nothing has been sent for as long."""

MAX_LOGPROBS = 256 * 1024
"""The most log probabilities in an unstreamed response, each of which takes about 0.4 KB until it is sent: with 20
alternatives, those of 12,483 tokens."""

MAX_PROMPT_TOKENS = 1024 * 1024
"""The most tokens of prompts whose ids a response has: each takes about 40 bytes until it is sent."""

ResultT = TypeVar("ResultT")


class HttpExchange(NamedTuple):
    """The means to answer one HTTP request."""

    client: WireClient
    """The client of the request's tenant."""
    served_as: str
    """The model behind the requested name."""
    headers: Mapping[str, str]
    """Headers for messages, which belong to a trace."""
    limit: ConcurrencyLimit
    writer: ResponseWriter
    log: RequestLog
    records: TenantRecords
    """The stored records of the request's tenant."""


Recording = Callable[[Sequence[AnswerEventReader]], Awaitable[None]]
"""Stores complete answers, before their end is sent."""


async def generate(parsed: ParsedGeneration, endpoint: ApiEndpoint[Any], exchange: HttpExchange) -> None:
    """Has a model generate, and sends its answers. Raises ApiError if any of them fails before the response starts."""
    client, served_as, headers, limit, writer, log, records = exchange
    prompts = await _prompts(parsed, exchange) if parsed.shows_prompts else []
    answers = client.generate_choices(served_as, parsed.requests, parsed.n, headers=headers)
    num_choices = len(parsed.requests) * parsed.n
    encoder = parsed.encoder(ResponseHead(answers.request_id, int(time.time()), parsed.model, lambda: log.age_s))
    if parsed.shows_prompts:
        cast(PromptShowingEncoder, encoder).show_prompts(prompts)
    record = None
    if parsed.is_stored:
        record = functools.partial(_record, cast(RecordingEncoder, encoder), records)
    with limit.track(answers):
        async with answers:  # leaving the block cancels the request
            if parsed.stream:
                await send_stream(
                    answers,
                    num_choices,
                    encoder,
                    writer,
                    log,
                    streamed_errors=endpoint.streamed_errors,
                    keeps_logprobs=endpoint.repeats_logprobs,
                    counts_tokens=parsed.counts_tokens,
                    record=record,
                )
            else:
                await send_whole(answers, num_choices, encoder, writer, log, record)


async def _prompts(parsed: ParsedGeneration, exchange: HttpExchange) -> list[Sequence[int]]:
    """Returns the token ids of requests' prompts. Raises RequestError, and ApiError if they are too many."""
    open_call = OpenCall()
    with exchange.limit.track(open_call):
        return await open_call.run(_tokenize_all(parsed.requests, parsed.n, exchange))


async def _tokenize_all(
    requests: Sequence[GenerateRequest], num_copies: int, exchange: HttpExchange
) -> list[Sequence[int]]:
    found: list[Sequence[int]] = []
    for one in requests:
        if isinstance(one.token_ids, bytes):
            found.append(block_hash.unpack_token_ids(one.token_ids).tolist())
        else:
            reply = await exchange.client.tokenize(exchange.served_as, conversation.prompt_of(one))
            found.append(reply.token_ids or [])
        if sum(map(len, found)) > MAX_PROMPT_TOKENS // num_copies:
            raise http_errors.ApiError(http_errors.TOO_MANY_PROMPT_TOKENS)
    return found


async def _record(encoder: RecordingEncoder, records: TenantRecords, answers: Sequence[AnswerEventReader]) -> None:
    packed = await asyncio.to_thread(encoder.records, answers)  # with log probabilities it may be tens of megabytes
    encoder.stored(await records.keep(packed))


async def call(parsed: ParsedCall[Any, Any], exchange: HttpExchange) -> None:
    """Makes a call and sends its reply. Raises RequestError."""
    open_call = OpenCall()
    with exchange.limit.track(open_call):
        reply = await open_call.run(parsed.send(exchange.client, exchange.served_as, parsed.request))
    exchange.log.usage = parsed.usage_of(reply)
    exchange.writer.rate_limits = _limits_told(reply)
    timed = parsed.encode_timed
    encoded = parsed.encode(reply) if timed is None else timed(reply, exchange.log.age_s)
    await exchange.writer.send_json(200, encoded)


def _limits_told(reply: object) -> messages.RateLimits | None:
    """Returns what a client has left of its limits after a reply, or after several."""
    replies = reply if isinstance(reply, list) else [reply]
    pooled = [one for one in replies if isinstance(one, messages.EmbedReply | messages.RerankReply)]
    return rate_limits.least([one.rate_limits for one in pooled if one.rate_limits])


async def send_whole(
    answers: Answers,
    num_choices: int,
    encoder: AnswerEncoder,
    writer: ResponseWriter,
    log: RequestLog,
    record: Recording | None = None,
) -> None:
    """Waits for all answers to end, and sends one response. Raises ApiError if any of them fails."""
    readers = [AnswerEventReader() for _ in range(num_choices)]
    num_logprobs = 0
    async for number, chunk in answers.chunks():
        log.on_chunk(chunk, number)
        writer.rate_limits = chunk.rate_limits or writer.rate_limits
        num_logprobs += sum(1 + len(token.top) for token in chunk.logprobs or ())
        num_logprobs += sum(1 + len(token.top) for token in chunk.prompt_logprobs or ())
        if num_logprobs > MAX_LOGPROBS:
            raise http_errors.ApiError(http_errors.TOO_MANY_LOGPROBS)
        readers[number].read(chunk)
        response = http_errors.from_terminal(chunk)
        if response is not None:
            raise http_errors.ApiError(response)
    if record is not None:
        await record(readers)
    await writer.send_json(200, encoder.whole(readers))


async def send_stream(
    answers: Answers,
    num_choices: int,
    encoder: AnswerEncoder,
    writer: ResponseWriter,
    log: RequestLog,
    hold_s: float = STATUS_HOLD_S,
    streamed_errors: frozenset[str] = frozenset(),
    *,
    keeps_logprobs: bool = False,
    counts_tokens: bool = False,
    record: Recording | None = None,
) -> None:
    """Sends the answers as events. Raises ApiError if any of them fails before the first event, unless the error is to
    be streamed."""
    readers = [
        AnswerEventReader(keeps_logprobs=keeps_logprobs, counts_tokens=counts_tokens) for _ in range(num_choices)
    ]
    num_open = num_choices
    sent_s = 0.0
    async for number, chunk in answers.chunks():
        log.on_chunk(chunk, number)
        writer.rate_limits = chunk.rate_limits or writer.rate_limits
        events = readers[number].read(chunk)
        encoded = encoder.encode(number, events) if events else []
        response = http_errors.from_terminal(chunk)
        if response is not None:
            if not (writer.has_started or encoded or response.code in streamed_errors):
                raise http_errors.ApiError(response)
            await writer.send_events(*encoded, *encoder.fail(writer.named(response)), last=True)
            return
        if chunk.finish_reason is not None:
            num_open -= 1
            if record is not None and not num_open:
                await writer.send_events(*encoded)  # storing may take a moment
                await record(readers)
                encoded = []
            encoded += [] if num_open else encoder.end()
        if encoded:
            sent_s = log.age_s
            await writer.send_events(*encoded, last=not num_open)
        # Workers and routers send empty chunks while a request waits, and these trigger the comments: no timer is
        # needed.
        elif not chunk.tokens and log.age_s - sent_s >= hold_s:
            sent_s = log.age_s
            loaded = None if chunk.load_progress is UNSET else chunk.load_progress
            await writer.send_events(encoder.keep_alive(loaded))


class OpenCall:
    """A call that can be ended when the gateway shuts down."""

    def __init__(self) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Returns the call's result. Raises RequestError with the error of `fail` if that is called first."""
        working = tasks.awaited(call)
        try:
            either: set[asyncio.Future[Any]] = {working, self._failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._failure.result()
            return working.result()
        finally:
            working.cancel()

    def cancel(self) -> None:
        """Does nothing: `fail` follows, and the client library then cancels whatever can be cancelled."""

    def fail(self, error: errors.Error) -> None:
        """Ends the call with an error."""
        if not self._failure.done():
            self._failure.set_exception(errors.RequestError(error))
            self._failure.exception()  # marks it as retrieved: the call may have just ended by itself
