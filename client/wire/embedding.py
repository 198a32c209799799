"""Embeds and ranks any number of inputs, in several wire requests of which a few run at a time."""

import asyncio
import base64
import contextlib
import re
from array import array
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol import tasks
from tokenbus.protocol.wire import codec, errors, messages, rate_limits

ReplyT = TypeVar("ReplyT")
INPUTS_AT_ONCE = 32
"""Inputs per request: their vectors of 4,096 numbers take 0.7 MiB in base64."""
_REQUESTS_AT_ONCE = 4
_PLACE = re.compile(r"(input|documents)\[(\d+)\]")


async def embed(client: WireClient, model: str, request: messages.EmbedRequest) -> messages.EmbedReply:
    """Returns the embeddings of all inputs. Raises RequestError, whose `param` counts all inputs."""
    inputs = request.input
    if not isinstance(inputs, list) or len(inputs) <= INPUTS_AT_ONCE:
        return await client.embed(model, request)
    turns = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def embed_some(start: int) -> messages.EmbedReply:
        some = codec.replace(request, id=f"{request.id}-{start}", input=inputs[start : start + INPUTS_AT_ONCE])
        async with turns:
            with _renumbering(start):
                return await client.embed(model, some)

    starts = range(0, len(inputs), INPUTS_AT_ONCE)
    return _joined(request.id or "", await _gathered(embed_some(start) for start in starts))


async def rank_each(
    client: WireClient, model: str, requests: Sequence[messages.RerankRequest]
) -> list[messages.RerankReply]:
    """Returns the reply to each request; if there are several, each has one document. Raises RequestError, whose
    `param` counts the documents of all requests."""
    turns = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def rank(number: int, request: messages.RerankRequest) -> messages.RerankReply:
        async with turns:
            with _renumbering(number):
                return await client.rerank(model, request)

    return await _gathered(rank(number, one) for number, one in enumerate(requests))


async def _gathered(calls: Iterable[Coroutine[Any, Any, ReplyT]]) -> list[ReplyT]:
    """Returns the results of all calls; if one fails, the others are cancelled."""
    running = [tasks.awaited(call) for call in calls]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()


def numbers_of(row: list[float] | str) -> list[float]:
    """Returns the numbers of an embedding, which in replies may be 32-bit little-endian floats in base64."""
    return row if isinstance(row, list) else list(array("f", base64.b64decode(row)))


def _joined(request_id: str, replies: list[messages.EmbedReply]) -> messages.EmbedReply:
    usages = [reply.usage for reply in replies if reply.usage]
    tokens = sum(usage.prompt_tokens for usage in usages)
    told = rate_limits.least([reply.rate_limits for reply in replies if reply.rate_limits])
    return messages.EmbedReply(
        id=request_id,
        model=replies[0].model,
        embeddings=[row for reply in replies for row in reply.embeddings or []],
        usage=messages.Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens, cached_tokens=0),
        rate_limits=codec.unset_if_none(told),
    )


@contextlib.contextmanager
def _renumbering(start: int) -> Iterator[None]:
    """Renumbers the input that a RequestError raised in the block is about: the first one of its request is input
    `start` of all."""

    def shift(text: str) -> str:
        return _PLACE.sub(lambda place: f"{place[1]}[{int(place[2]) + start}]", text, count=1)

    try:
        yield
    except errors.RequestError as refused:
        error = refused.error
        if error.param is None or not _PLACE.match(error.param):
            raise
        shifted = codec.replace(error, param=shift(error.param), message=shift(error.message))
        raise errors.RequestError(shifted) from refused
