"""Serves an endpoint that generates: one request from its body to its last event, in its dialect's terms."""

import functools
import time
from collections.abc import Callable

from msgspec import UNSET

from tokenbus.client.choices import Answers
from tokenbus.gateway.admission.endpoint import Endpoint, HttpExchange, Services
from tokenbus.gateway.admission.request_log import RequestLog
from tokenbus.gateway.generation.answer_events import AnswerEventReader
from tokenbus.gateway.generation.dialect import Dialect, EventEncoder, ParsedRequest, ResponseHead
from tokenbus.gateway.http import body, http_errors
from tokenbus.gateway.http.response_writer import ResponseWriter
from tokenbus.protocol.wire import messages

STATUS_HOLD_S = 10.0
"""A streamed response starts with its first event, or after this time; until then an error can still set the status.
After that it is kept alive whenever nothing has been sent for as long."""

MAX_LOGPROBS = 256 * 1024
"""The most log probabilities in an unstreamed response, each of which takes about 0.4 KB until it is sent: with 20
alternatives, those of 12,483 tokens."""


class GenerationEndpoint(Endpoint):
    """The ASGI application of one endpoint; watches for a client disconnect during the response."""

    def __init__(self, services: Services, dialect: Dialect) -> None:
        super().__init__(services, dialect)
        self._dialect = dialect

    async def _serve(self, exchange: HttpExchange) -> None:
        request, writer, log = exchange.request, exchange.writer, exchange.log
        parsed = await self._read(exchange)
        served_as = self._services.aliases.resolve(parsed.model, parsed.requests[0].session_id or exchange.request_id)
        client, headers = exchange.tenant.client, exchange.span.headers()
        submit = functools.partial(client.generate_choices, served_as, parsed.requests, parsed.n, headers=headers)
        try:
            await body.cancel_on_disconnect(request.receive, self._respond(submit, parsed, writer, log))
        except http_errors.ApiError as error:
            raise http_errors.ApiError(parsed.named(error.response)) from error

    async def _read(self, exchange: HttpExchange) -> ParsedRequest:
        # In a separate method, so that nothing holds the body while the request is served.
        payload = await body.read(exchange.request, self._services.bodies.max_body_bytes, exchange.held_body)
        default = self._services.aliases.default
        parse = functools.partial(self._dialect.parse, payload, exchange.request.headers, exchange.request_id, default)
        parsed = await self._services.parser.parse(parse, len(payload))
        exchange.log.received(parsed.model, stream=parsed.stream, body_bytes=len(payload), n=parsed.n)
        return parsed

    async def _respond(
        self, submit: Callable[[], Answers], parsed: ParsedRequest, writer: ResponseWriter, log: RequestLog
    ) -> None:
        choices, num_choices = submit(), len(parsed.requests) * parsed.n
        head = ResponseHead(choices.request_id, int(time.time()), parsed.model)
        with self._services.limit.track(choices):
            async with choices:  # leaving the block cancels the request
                if parsed.stream:
                    await stream_response(
                        choices,
                        num_choices,
                        parsed.encoder(head),
                        writer,
                        log,
                        streamed_errors=self._dialect.streamed_errors,
                        keeps_logprobs=self._dialect.repeats_logprobs,
                    )
                else:
                    encode = functools.partial(parsed.encode_whole, head)
                    await respond(choices, num_choices, encode, writer, log)


async def respond(
    choices: Answers,
    num_choices: int,
    encode: Callable[[list[AnswerEventReader]], bytes],
    writer: ResponseWriter,
    log: RequestLog,
) -> None:
    """Waits for all answers to end, and sends one response. Raises ApiError if any of them fails."""
    answers = [AnswerEventReader() for _ in range(num_choices)]
    num_logprobs = 0
    async for number, chunk in choices.chunks():
        log.on_chunk(chunk, number)
        num_logprobs += sum(1 + len(token.top) for token in chunk.logprobs or ())
        if num_logprobs > MAX_LOGPROBS:
            raise http_errors.ApiError(http_errors.TOO_MANY_LOGPROBS)
        answers[number].read(chunk)
        response = http_errors.from_terminal(chunk)
        if response is not None:
            raise http_errors.ApiError(response)
    await writer.send_json(200, encode(answers))


async def stream_response(
    choices: Answers,
    num_choices: int,
    encoder: EventEncoder,
    writer: ResponseWriter,
    log: RequestLog,
    hold_s: float = STATUS_HOLD_S,
    streamed_errors: frozenset[str] = frozenset(),
    *,
    keeps_logprobs: bool = False,
) -> None:
    """Sends the answers as events. Raises ApiError if any of them fails before the first event, unless the error is to
    be streamed."""
    answers = [AnswerEventReader(keeps_logprobs=keeps_logprobs) for _ in range(num_choices)]
    num_open = num_choices
    sent_s = 0.0
    async for number, chunk in choices.chunks():
        log.on_chunk(chunk, number)
        events = answers[number].read(chunk)
        encoded = encoder.encode(number, events) if events else []
        response = http_errors.from_terminal(chunk)
        if response is not None:
            if not (writer.has_started or encoded or response.code in streamed_errors):
                raise http_errors.ApiError(response)
            await writer.send_events(*encoded, *encoder.fail(writer.named(response)), last=True)
            return
        if chunk.finish_reason is not None:
            num_open -= 1
            encoded += [] if num_open else encoder.end()
        if encoded:
            sent_s = log.age_s
            await writer.send_events(*encoded, last=not num_open)
        # Workers and routers send empty chunks while a request waits, and these trigger the comments: no timer is
        # needed.
        elif not chunk.tokens and log.age_s - sent_s >= hold_s:
            sent_s = log.age_s
            await writer.send_events(*_comment(chunk), encoder.keep_alive())


def _comment(chunk: messages.Chunk) -> list[bytes]:
    """Returns a comment with the model's loading progress, if it is being loaded."""
    if chunk.load_progress is UNSET:
        return []
    return [b": loading the model, %d %%\n\n" % round(100 * chunk.load_progress)]
