"""The commands of an operator: `load` and `unload`, by control messages to a running worker."""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from nats.aio.msg import Msg

from tokenbus.cli import connection_flags
from tokenbus.cli.commands.generate import error_text, print_error, with_client
from tokenbus.client import Client
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.wire import codec, errors, internal, subjects

_FIRST_REPLY_S = 5.0
_SILENCE_S = 60.0
"""Progress comes twice a second."""
_replies = codec.Decoder(internal.ControlReply)


def load(options: argparse.Namespace) -> int:
    """Has a worker load one more model, and shows how far it is; returns the exit status."""
    return with_client(options, _load)


def unload(options: argparse.Namespace) -> int:
    """Has a worker finish what it runs and give its memory back; returns the exit status."""
    return with_client(options, _unload)


def engine_setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE of an engine setting; the value is read as JSON if it is some, else as a word."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


async def _load(options: argparse.Namespace, client: Client) -> int:
    control = internal.Control(
        op="load",
        model=options.model,
        served_name=options.served_name,
        replicas=options.replicas,
        settings=dict(options.set),
    )
    async for reply in _ask(options, client, control):
        if not reply.ok:
            assert reply.error is not None
            return print_error(error_text(reply.error))
        if reply.worker_ids:
            print(f"serving as {', '.join(reply.worker_ids)}")
            return 0
        if reply.progress is not None and sys.stderr.isatty():
            print(f"\rloading {reply.progress:.0%} ", end="", file=sys.stderr, flush=True)
    return print_error("the worker has stopped answering")


async def _unload(options: argparse.Namespace, client: Client) -> int:
    async for reply in _ask(options, client, internal.Control(op="unload")):
        if reply.error is not None:
            return print_error(error_text(reply.error))
        print(f"{options.worker_id} takes nothing new and leaves when it has finished what it runs")
        return 0
    return print_error("the worker does not answer")


async def _ask(
    options: argparse.Namespace, client: Client, control: internal.Control
) -> AsyncIterator[internal.ControlReply]:
    """The replies of a worker as they come. Raises RequestError when there is no such worker."""
    subject = subjects.Subjects(options.prefix).worker(await _model_of(client, options), options.worker_id, "control")
    replies: asyncio.Queue[internal.ControlReply] = asyncio.Queue()
    connection = await nats.connect(connection_flags.settings_of(options), name="tokenbus operator")
    try:
        inbox = connection.new_inbox()

        def take(message: Msg) -> None:
            if message.data:
                replies.put_nowait(_replies.decode(message.data))

        await connection.subscribe(inbox, take)
        connection.publish(subject, codec.encode(control), reply=inbox)
        patience_s = _FIRST_REPLY_S
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    yield await replies.get()
            except TimeoutError:
                return
            patience_s = _SILENCE_S
    finally:
        await connection.close()


async def _model_of(client: Client, options: argparse.Namespace) -> str:
    """The served model of a worker, which is a part of its subjects."""
    reply = await client.models()
    cards = [card for served in reply.models for card in served.workers or []]
    found = [card.model for card in cards if card.worker_id == options.worker_id]
    if len(found) > 1:
        problem = f"{options.worker_id} is the name of a worker of each of {', '.join(found)}: give them other names"
        raise errors.request_error(errors.Code.INVALID_REQUEST, problem)
    if found:
        return found[0]
    known = ", ".join(card.worker_id for card in cards) or "none"
    raise errors.request_error(errors.Code.NO_WORKER, f"there is no worker {options.worker_id}: there is {known}")
