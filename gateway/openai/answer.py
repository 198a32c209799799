"""Answers an HTTP request with what comes of its stream."""

from tokenbus.client import Stream
from tokenbus.gateway.openai import chat_response, error_responses
from tokenbus.gateway.openai.response_writer import ResponseWriter
from tokenbus.gateway.request_log import RequestLog

STATUS_HOLD_S = 10.0
"""An answer in events is not begun for so long while its stream says nothing: it may still turn out to be an error,
which is then its status. Later it begins, and comments keep it alive."""


async def respond(
    stream: Stream, answer: chat_response.CompletionBuilder, writer: ResponseWriter, request_log: RequestLog
) -> None:
    """Waits for the terminal, and answers once."""
    async for chunk in stream:
        request_log.on_chunk(chunk)
        answer.add(chunk)
    response = error_responses.from_terminal(chunk)
    if response is None:
        await writer.send_json(200, answer.build(chunk))
    else:
        await writer.send_error(response)


async def stream_response(
    stream: Stream,
    events: chat_response.ChunkEncoder,
    writer: ResponseWriter,
    request_log: RequestLog,
    hold_s: float = STATUS_HOLD_S,
) -> None:
    """Answers as the stream speaks, or with an error if it fails before."""
    async for chunk in stream:
        request_log.on_chunk(chunk)
        response = error_responses.from_terminal(chunk)
        if response is not None and not writer.has_started and not chunk.text:
            await writer.send_error(response)
            return
        said = events.encode(chunk)
        if said:
            await writer.send_events(*said, last=chunk.finish_reason is not None)
        elif not chunk.tokens and request_log.age_s >= hold_s:
            await writer.send_events(chat_response.KEEP_ALIVE)
