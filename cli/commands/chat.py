"""`tokenbus chat`: a conversation on the terminal."""

import argparse
import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator

from tokenbus.cli.commands import generate
from tokenbus.client import Client, Stream
from tokenbus.protocol.process import shutdown
from tokenbus.protocol.wire import errors, messages

_HELP = "Type a message. /new starts over, /undo takes a turn back, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


class Conversation:
    """What was said so far, and how the next turn is asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._system = [_turn("system", options.system)] if options.system else []
        self._turns: list[messages.ChatMessage] = []
        self._session_id = secrets.token_hex(8)

    def __repr__(self) -> str:
        return f"<Conversation of {len(self._turns)} turns>"

    def restart(self) -> None:
        self._turns.clear()
        self._session_id = secrets.token_hex(8)

    def undo(self) -> None:
        """Takes the last question back, with its answer."""
        del self._turns[-2:]

    def ask(self, client: Client, text: str) -> Stream:
        """The stream of an answer; it becomes part of the conversation by `add_answer`."""
        self._turns.append(_turn("user", text))
        fields = {
            name: value for name in generate.REQUEST_FIELDS if (value := getattr(self._options, name, None)) is not None
        }
        return client.generate(
            self._options.model, messages=[*self._system, *self._turns], session_id=self._session_id, **fields
        )

    def add_answer(self, text: str, *, failed: bool) -> None:
        """A question that failed is forgotten: the next one would fail with it."""
        if failed:
            self._turns.pop()
        else:
            self._turns.append(_turn("assistant", text))


def run(options: argparse.Namespace) -> int:
    """Talks until the end of the input; returns the exit status."""
    return generate.with_client(options, _chat)


async def _chat(options: argparse.Namespace, client: Client) -> int:
    conversation = Conversation(options)
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
                conversation.restart()
            case "/undo":
                conversation.undo()
            case text if text.startswith("/"):
                print(_HELP, file=sys.stderr)
            case text:
                try:
                    status = await _answer(conversation, conversation.ask(client, text))
                except errors.RequestError as error:
                    why = await generate.with_served_models(client, options.model, error.error)
                    status = generate.print_error(generate.error_text(why))
    return status


async def _answer(conversation: Conversation, stream: Stream) -> int:
    """Raises RequestError where there is none."""
    texts: list[str] = []
    with _cancel_on_ctrl_c(stream):
        async for chunk in stream:
            texts.append(chunk.text)
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            if chunk.finish_reason is not None:
                print(flush=True)
                conversation.add_answer("".join(texts), failed=bool(chunk.error))
                generate.print_summary(chunk)
                return 0
    raise AssertionError("a stream ends with a terminal")


@contextlib.contextmanager
def _cancel_on_ctrl_c(stream: Stream) -> Iterator[None]:
    """Ctrl-C stops the answer and not the conversation; a second Ctrl-C ends both."""
    with shutdown.on_stop(stream.cancel, signals=[signal.SIGINT]):
        yield


async def _lines(prompt: str) -> AsyncIterator[str]:
    """The lines of standard input, read without holding up the connection."""
    while True:
        if prompt:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = await asyncio.to_thread(sys.stdin.buffer.readline)
        if not line:
            return
        yield generate.decode_utf8(line, "the line")


def _turn(role: str, text: str) -> messages.ChatMessage:
    return messages.ChatMessage(role=role, content=text)
