"""An operator's messages to workers, and their replies."""

import contextlib
from collections.abc import AsyncIterator

from tokenbus.cli.console.session import print_request_error
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, internal, messages, subjects


async def ask(client: WireClient, worker_id: str, control: internal.Control) -> AsyncIterator[internal.ControlReply]:
    """Yields the replies of a worker to a control message, the last one an error if it falls silent. Raises
    RequestError for an unknown worker."""
    worker = _find(await cards(client), worker_id)
    async with contextlib.aclosing(client.command_workers([worker], control)) as replies:
        async for one in replies:
            yield one.reply


async def carry_out(client: WireClient, worker_id: str, control: internal.Control, done: str) -> int:
    """Prints `done` if a worker agrees to a control message; returns the exit status."""
    async for reply in ask(client, worker_id, control):
        if reply.error is not None:
            return await print_request_error(client, None, reply.error)
        print(done)
    return 0


async def cards(client: WireClient) -> list[messages.Card]:
    """Returns the cards of all workers. Raises RequestError."""
    return (await client.models()).cards


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
