"""`tokenbus chat`: a conversation with a model on the terminal."""

import argparse
import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial

from tokenbus.cli.commands import generate
from tokenbus.cli.console import answers, connection_flags
from tokenbus.cli.console.session import decode_utf8, print_request_error, with_client
from tokenbus.client.answer import Answer
from tokenbus.client.wire.request_fields import ChatMessageFields
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.process import shutdown
from tokenbus.protocol.wire import errors

_HELP = "Type a message. /new starts over, /undo takes a turn back, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


def add_flags(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("--model", metavar="NAME", required=True, help="the served model")
    generate.add_sampling_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_chat, options)))


async def _chat(options: argparse.Namespace, client: WireClient) -> int:
    """Chats until the input ends; returns the exit status of the last answer."""
    system = [ChatMessageFields(role="system", content=options.system)] if options.system else []
    turns: list[ChatMessageFields] = []
    session_id = secrets.token_hex(8)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(_HELP, file=sys.stderr)
    status = 0
    async for line in _lines(prompt="> " if is_terminal else ""):
        match line.strip():
            case "":
                continue
            case "/quit":
                return status
            case "/new":
                turns.clear()
                session_id = secrets.token_hex(8)
            case "/undo":
                del turns[-2:]
            case text if text.startswith("/"):
                print(_HELP, file=sys.stderr)
            case text:
                question = ChatMessageFields(role="user", content=text)
                try:
                    said = await _answer(options, client, [*system, *turns, question], session_id)
                    # A failed question is forgotten, since the next one would fail with it.
                    turns += [question, said.to_message()]
                    status = 0
                except errors.RequestError as error:
                    status = await print_request_error(client, options.model, error.error)
    return status


async def _answer(
    options: argparse.Namespace, client: WireClient, conversation: list[ChatMessageFields], session_id: str
) -> Answer:
    """Prints the answer to a conversation and returns it. Raises RequestError."""
    fields = generate.request_fields(options)
    stream = client.generate(options.model, messages=conversation, session_id=session_id, **fields)
    with shutdown.on_stop(stream.cancel, signals=[signal.SIGINT]):  # a second Ctrl-C ends the conversation
        _, said = await answers.print_stream(stream)
    return said


async def _lines(prompt: str) -> AsyncIterator[str]:
    """Yields the lines of standard input, read in a thread so that the connection stays alive."""
    while True:
        if prompt:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = await asyncio.to_thread(sys.stdin.buffer.readline)
        if not line:
            return
        yield decode_utf8(line, "the line")
