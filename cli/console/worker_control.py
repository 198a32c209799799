"""An operator's messages to workers, and their replies."""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from nats.aio.msg import Msg

from tokenbus.cli.console import connection_flags
from tokenbus.cli.console.session import print_error, print_request_error
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects

FIRST_REPLY_S = 5.0
SILENCE_S = 60.0
"""A loading worker reports its progress twice per second."""
_replies = codec.Decoder(internal.ControlReply)


async def ask(
    options: argparse.Namespace, client: WireClient, control: internal.Control, timeout_s: float = FIRST_REPLY_S
) -> AsyncIterator[internal.ControlReply]:
    """Yields the replies of the worker that `options` name to a control message until it falls silent. Raises
    RequestError for an unknown worker."""
    found = [_find(await cards(client), options.worker_id)]
    async with contextlib.aclosing(_ask(options, found, control)) as replies:
        while True:  # a load reports progress for as long as it takes
            try:
                async with asyncio.timeout(timeout_s):
                    _, reply = await anext(replies)
            except TimeoutError:
                return
            yield reply
            timeout_s = SILENCE_S


async def carry_out(
    options: argparse.Namespace,
    client: WireClient,
    control: internal.Control,
    done: str,
    timeout_s: float = FIRST_REPLY_S,
) -> int:
    """Prints `done` if the worker that `options` name agrees to a control message; returns the exit status."""
    async for reply in ask(options, client, control, timeout_s):
        if reply.error is not None:
            return await print_request_error(client, None, reply.error)
        print(done)
        return 0
    return print_error("the worker does not answer")


async def ask_each(
    options: argparse.Namespace, workers: Sequence[subjects.WorkerAddress], control: internal.Control
) -> AsyncIterator[tuple[subjects.WorkerAddress, internal.ControlReply]]:
    """Yields the first reply of each worker to a control message, for as long as `FIRST_REPLY_S`."""
    silent = set(workers)
    async with contextlib.aclosing(_ask(options, workers, control)) as replies:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REPLY_S):
                while silent:
                    worker, reply = await anext(replies)
                    silent.discard(worker)
                    yield worker, reply


async def cards(client: WireClient) -> list[messages.Card]:
    """Returns the cards of all workers. Raises RequestError."""
    return (await client.models()).cards


async def _ask(
    options: argparse.Namespace, workers: Sequence[subjects.WorkerAddress], control: internal.Control
) -> AsyncGenerator[tuple[subjects.WorkerAddress, internal.ControlReply], None]:
    """Yields replies forever."""
    names, replies = subjects.Subjects(options.prefix), asyncio.Queue[tuple[int, internal.ControlReply]]()
    connection = await nats.connect(connection_flags.settings_of(options), name="tokenbus operator")
    try:
        inbox = connection.new_inbox()

        def take(message: Msg) -> None:
            number = int(message.subject.rpartition(".")[2])
            if message.data:
                replies.put_nowait((number, _replies.decode(message.data)))

        await connection.subscribe(f"{inbox}.*", take)
        for number, (model, worker_id) in enumerate(workers):
            subject = names.worker(model, worker_id, "control")
            connection.publish(subject, codec.encode(control), reply=f"{inbox}.{number}")
        while True:
            number, reply = await replies.get()
            yield workers[number], reply
    finally:
        await connection.close()


def _find(known: list[messages.Card], worker_id: str) -> subjects.WorkerAddress:
    """Returns the address of a worker, whose model is part of its subjects. Raises RequestError."""
    found = [card.address for card in known if card.worker_id == worker_id]
    if len(found) > 1:
        models = ", ".join(address.model for address in found)
        problem = f"workers of {models} are all named {worker_id}: give them different names"
        raise errors.request_error(errors.Code.INVALID_REQUEST, problem)
    if found:
        return found[0]
    names = ", ".join(card.worker_id for card in known) or "none"
    raise errors.request_error(errors.Code.NO_WORKER, f"there is no worker {worker_id}; workers: {names}")
