"""Serves an endpoint that generates: one request from its body to its last event, in the words of its dialect."""

import functools
import time
from collections.abc import Callable

from starlette.requests import Request

from tokenbus.client.choices import AnyChoices
from tokenbus.gateway.generation.answer_events import AnswerReader
from tokenbus.gateway.generation.dialect import Dialect, EventEncoder, ParsedRequest, ResponseHead
from tokenbus.gateway.http import body, http_errors
from tokenbus.gateway.http.endpoint import Endpoint, Exchange, Services
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.http.response_writer import ResponseWriter
from tokenbus.gateway.request_log import RequestLog

STATUS_HOLD_S = 10.0
"""A streamed response starts with its first event, or after this time; until then an error can still set the status."""


class GenerationEndpoint(Endpoint):
    """The ASGI application of one endpoint; watches for the client's disconnect during the response."""

    def __init__(self, services: Services, dialect: Dialect) -> None:
        super().__init__(services, dialect)
        self._dialect = dialect

    async def _serve(self, exchange: Exchange) -> None:
        request, writer, log = exchange.request, exchange.writer, exchange.log
        parsed = await self._read(request, log, exchange.request_id)
        served_as = self._services.aliases.resolve(parsed.model, parsed.requests[0].session_id or exchange.request_id)
        client, headers = exchange.tenant.client, exchange.span.headers()
        submit = functools.partial(client.generate_choices, served_as, parsed.requests, parsed.n, headers=headers)
        await body.cancel_on_disconnect(request.receive, self._respond(submit, parsed, writer, log))

    async def _read(self, request: Request, log: RequestLog, request_id: str) -> ParsedRequest:
        # In a method of its own, so that nothing holds the body while the request is served.
        payload = await body.read(request, self._services.broker.max_payload)
        parsed = self._dialect.parse(payload, request.headers, request_id)
        log.received(parsed.model, stream=parsed.stream, body_bytes=len(payload), n=parsed.n)
        return parsed

    async def _respond(
        self, submit: Callable[[], AnyChoices], parsed: ParsedRequest, writer: ResponseWriter, log: RequestLog
    ) -> None:
        choices, num_choices = submit(), len(parsed.requests) * parsed.n
        head = ResponseHead(choices.request_id, int(time.time()), parsed.model)
        error_body = self._dialect.error_body
        with self._services.limit.track(choices):
            async with choices:  # leaving the block cancels the request
                if parsed.stream:
                    await stream_response(choices, num_choices, parsed.encoder(head), error_body, writer, log)
                else:
                    encode = functools.partial(parsed.encode_whole, head)
                    await respond(choices, num_choices, encode, error_body, writer, log)


async def respond(
    choices: AnyChoices,
    num_choices: int,
    encode: Callable[[list[AnswerReader]], bytes],
    error_body: Callable[[ErrorResponse], bytes],
    writer: ResponseWriter,
    log: RequestLog,
) -> None:
    """Waits for the ends of all answers, and sends one response or error."""
    answers = [AnswerReader() for _ in range(num_choices)]
    async for number, chunk in choices.chunks():
        log.on_chunk(chunk, number)
        answers[number].read(chunk)
        response = http_errors.from_terminal(chunk)
        if response is not None:
            await writer.send_error(response, error_body(response))
            return
    await writer.send_json(200, encode(answers))


async def stream_response(
    choices: AnyChoices,
    num_choices: int,
    encoder: EventEncoder,
    error_body: Callable[[ErrorResponse], bytes],
    writer: ResponseWriter,
    log: RequestLog,
    hold_s: float = STATUS_HOLD_S,
) -> None:
    """Sends the answers as events, or one error if it comes before the first event."""
    answers = [AnswerReader() for _ in range(num_choices)]
    num_open = num_choices
    async for number, chunk in choices.chunks():
        log.on_chunk(chunk, number)
        events = answers[number].read(chunk)
        encoded = encoder.encode(number, events) if events else []
        response = http_errors.from_terminal(chunk)
        if response is not None:
            if writer.has_started or encoded:
                await writer.send_events(*encoded, *encoder.fail(response), last=True)
            else:
                await writer.send_error(response, error_body(response))
            return
        if chunk.finish_reason is not None:
            num_open -= 1
            encoded += [] if num_open else encoder.end()
        if encoded:
            await writer.send_events(*encoded, last=not num_open)
        # Workers and routers send empty chunks while a request waits, and these drive the comments: no timer is needed.
        elif not chunk.tokens and log.age_s >= hold_s:
            await writer.send_events(encoder.keep_alive())
