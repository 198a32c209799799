"""`tokenbus chat`: a conversation with a model on the terminal."""

import argparse
import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tokenbus.cli.commands import generate
from tokenbus.cli.console import answers, arguments, session, state
from tokenbus.cli.console.chat_history import ChatHistory
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.plain_text import printable
from tokenbus.cli.console.session import EXIT_INTERRUPTED, decode_utf8, print_request_error, with_client
from tokenbus.client.answer import Answer
from tokenbus.client.wire.request_fields import ChatMessageFields
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol import tasks
from tokenbus.protocol.process import signals
from tokenbus.protocol.wire import errors

_HELP = """\
/new    starts over: the model forgets the conversation
/undo   takes the last question and its answer back
/bye    leaves, as /exit, /quit and Ctrl-D do
/help   shows this

Ctrl-C stops an answer. A pasted text keeps its lines; Alt-Enter, or a backslash before Enter, begins another line.
The up and down arrows recall earlier messages, and Ctrl-R searches them."""
_COMMANDS = ("/new", "/undo", "/help", "/bye", "/exit", "/quit")
_LEAVING = ("/bye", "/exit", "/quit")
_CANCEL_TIMEOUT_S = 1.0
"""Time that a cancelled answer has to end with its last chunk."""
_SHOWN_CHARACTERS = 60


def add_flags(parser: Parser) -> None:
    flag = generate.add_chat_flags(parser)
    flag("--no-history", arguments.SWITCH, "do not keep the messages for the next chat")
    generate.add_sampling_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_chat, options)))


class ChatTurns:
    """The turns so far, and the session that they belong to."""

    def __init__(self, system: str | None = None) -> None:
        self._system = [ChatMessageFields(role="system", content=system)] if system else []
        self._turns: list[tuple[ChatMessageFields, ChatMessageFields]] = []
        self.session_id = secrets.token_hex(8)

    def __repr__(self) -> str:
        return f"<ChatTurns of {len(self._turns)} turns>"

    def with_question(self, text: str) -> list[ChatMessageFields]:
        """Returns the whole conversation with a new question at its end."""
        said = [message for turn in self._turns for message in turn]
        return [*self._system, *said, ChatMessageFields(role="user", content=text)]

    def add(self, question: str, answer: ChatMessageFields) -> None:
        self._turns.append((ChatMessageFields(role="user", content=question), answer))

    def start_over(self) -> str:
        """Forgets all turns; returns what it did, in words."""
        forgotten = len(self._turns)
        self._turns.clear()
        self.session_id = secrets.token_hex(8)
        return f"started over, without {_turns(forgotten)}" if forgotten else "started over: nothing had been said"

    def undo(self) -> str:
        """Takes the last turn back; returns what it did, in words."""
        if not self._turns:
            return "there is nothing to take back"
        question, _ = self._turns.pop()
        left = _turns(len(self._turns)) + " left" if self._turns else "nothing is left"
        return f"took back {_shortened(str(question['content']))!r} and its answer; {left}"


def _turns(count: int) -> str:
    return f"{count} turn" if count == 1 else f"{count} turns"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


class _Input(Protocol):
    async def read(self) -> str:
        """Returns the next message. Raises EOFError at the end, and KeyboardInterrupt for Ctrl-C at the prompt."""
        ...


class _PipedLines:
    """The lines of standard input, read in a thread so that the connection stays alive."""

    async def read(self) -> str:
        line = await asyncio.to_thread(sys.stdin.buffer.readline)
        if not line:
            raise EOFError
        return decode_utf8(line, "the line")


async def _chat(options: argparse.Namespace, client: WireClient) -> int:
    """Chats until the input ends; returns the exit status of the last answer."""
    model = await session.model_of(options, client, "generate")
    if options.model is not None:
        await _check_served(client, model)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return await _converse(options, client, model, _PipedLines())
    from tokenbus.cli.console.line_editor import LineEditor  # takes a while to import

    history = None if options.no_history else ChatHistory(state.folder("chat") / "history")
    if history is not None:
        with contextlib.suppress(OSError):  # the editor says so when it can't keep the next message
            history.shorten()
    editor = LineEditor(history)
    task = asyncio.current_task()
    assert task is not None
    # Ended from outside, the terminal must be left as it was; Ctrl-C is a key that the editor reads.
    with signals.on_stop(task.cancel, signals=[signal.SIGTERM, *signals.HANGUP]):
        _say(f"Chatting with {printable(model)}. /help shows what can be typed, Ctrl-D leaves.")
        status = await _converse(options, client, model, editor)
    if editor.problem:
        _say(f"these messages are not kept for the next chat: {editor.problem}")
    return status


async def _check_served(client: WireClient, model: str) -> None:
    """Raises RequestError for a model that is not being served, before anything is typed for it."""
    served = {one.model for one in (await client.models(with_workers=False)).models}
    if not served & {model, model.rpartition(":")[0]}:  # an adapter follows the name of its model
        raise errors.request_error(errors.Code.NO_WORKER, f"nothing serves {model!r} now")


async def _converse(options: argparse.Namespace, client: WireClient, model: str, source: _Input) -> int:
    conversation, status, was_interrupted = ChatTurns(options.system), 0, False
    while True:
        try:
            text = await source.read()
        except EOFError:
            return status
        except KeyboardInterrupt:
            if was_interrupted:
                return EXIT_INTERRUPTED
            was_interrupted = True
            _say("Ctrl-D, /bye or another Ctrl-C leaves")
            continue
        was_interrupted = False
        if text.rstrip() in _LEAVING:
            return status
        if text.startswith("/") and (said := _command(text.rstrip(), conversation)):
            _say(said)
        elif text.strip():
            status = await _ask(options, client, model, conversation, text.strip())


def _command(text: str, conversation: ChatTurns) -> str:
    """Carries out a command; returns what there is to say about it. Returns nothing for a text that is none, such as
    one that begins with a path."""
    done: dict[str, Callable[[], str]] = {
        "/new": conversation.start_over,
        "/undo": conversation.undo,
        "/help": lambda: _HELP,
    }
    if text in done:
        return done[text]()
    name = text.split()[0]
    if not name[1:].isalpha() or "\n" in text:
        return ""
    if name in _COMMANDS:
        return f"{name} takes nothing after it"
    return f"there is no command {name}, only {', '.join(_COMMANDS)}; a space before it makes it a message"


async def _ask(options: argparse.Namespace, client: WireClient, model: str, conversation: ChatTurns, text: str) -> int:
    """Prints the answer to a question and adds both to the conversation; returns the exit status."""
    try:
        said = await _answer(options, client, model, conversation, text)
    except errors.RequestError as error:
        # A failed question is forgotten, since the next one would fail with it.
        return await print_request_error(client, model, error.error)
    if said is not None:
        conversation.add(text, said.to_message())
    return 0


async def _answer(
    options: argparse.Namespace, client: WireClient, model: str, conversation: ChatTurns, text: str
) -> Answer | None:
    """Prints the answer and returns it, or None if it was stopped and its end did not come. Raises RequestError."""
    fields = generate.request_fields(options)
    whole = conversation.with_question(text)
    async with client.generate(model, messages=whole, session_id=conversation.session_id, **fields) as stream:
        printing = tasks.awaited(answers.print_stream(stream))

        def stop() -> None:
            stream.cancel()
            asyncio.get_running_loop().call_later(_CANCEL_TIMEOUT_S, printing.cancel)

        try:
            with signals.on_stop(stop, signals=[signal.SIGINT]):  # a second Ctrl-C ends the conversation
                await asyncio.wait([printing])
        finally:
            printing.cancel()
        if printing.cancelled():
            _say("\n[stopped]")
            return None
        return printing.result()[1]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
