"""Answers an HTTP request with what comes of its stream."""

from tokenbus.client import Stream
from tokenbus.gateway.journal import Journal
from tokenbus.gateway.openai import failures, told
from tokenbus.gateway.openai.reply import Reply

HOLD_S = 10.0
"""An answer in events is not begun for so long while its stream says nothing: it may still turn out to be an error,
which is then its status. Later it begins, and comments keep it alive."""


async def whole(stream: Stream, answer: told.Whole, reply: Reply, journal: Journal) -> None:
    """Waits for the terminal, and answers once."""
    async for chunk in stream:
        journal.heard(chunk)
        answer.take(chunk)
    failure = failures.of_terminal(chunk)
    if failure is None:
        await reply.whole(200, answer.completion(chunk))
    else:
        await reply.fail(failure)


async def in_events(
    stream: Stream, events: told.Events, reply: Reply, journal: Journal, hold_s: float = HOLD_S
) -> None:
    """Answers as the stream speaks, or with an error if it fails before."""
    async for chunk in stream:
        journal.heard(chunk)
        failure = failures.of_terminal(chunk)
        if failure is not None and not reply.has_begun and not chunk.text:
            await reply.fail(failure)
            return
        said = events.of(chunk)
        if said:
            await reply.events(*said, last=chunk.finish_reason is not None)
        elif not chunk.tokens and journal.age_s >= hold_s:
            await reply.events(told.STILL_HERE)
