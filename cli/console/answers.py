"""Answers on the terminal: the flags for their form, and how they are printed."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec
from msgspec import UNSET

from tokenbus.cli.console.arguments import COUNT, PATH, SWITCH, TEXT, one_of, text
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.plain_text import printable
from tokenbus.client.answer import Answer, AnswerBuilder
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.protocol.wire import errors, messages
from tokenbus.protocol.wire.reasoning import EFFORTS

if TYPE_CHECKING:
    from tokenbus.cli.console.word_wrap import WordWrap

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_LINE_START, _LINE_END = "\r", "\x1b[K"
_PICTURES = 0x2400
"""Unicode has a picture of each control character from here on: ␛ for ESC."""
_SHOWN = {code: _PICTURES + code for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def add_form_flags(parser: Parser) -> None:
    """Adds the flags that constrain an answer."""
    flag = parser.group("form of the answer (one of these)", exclusive=True)
    flag("--schema -jf --json-schema-file", PATH, "a JSON schema that the answer follows")
    flag("--json-object", SWITCH, "the answer is a JSON object")
    flag("--regex", text("REGEX"), "a regular expression that the whole answer matches")
    flag("--choice", TEXT, "the answer is one of the texts given", [])
    flag("--grammar --grammar-file", PATH, "a grammar (GBNF or Lark) that the answer follows")


def add_thinking_flags(parser: Parser) -> None:
    flag, own = parser.group("reasoning"), "the template's"
    thinking = "whether the model reasons before it answers, if its template has the switch enable_thinking"
    flag("--thinking --think", one_of("on", "off"), thinking, unset=own, const="on")
    budget = "tokens of reasoning after which it is closed and the answer continues"
    flag("--thinking-budget --reasoning-budget", COUNT, budget, unset="no limit")
    flag("--effort --reasoning-effort", one_of(*EFFORTS), "how long to reason if no budget is given", unset=own)


def form_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the request fields that these flags mean. Raises ValueError for a file that can't be used."""
    fields = {name: value for name in ("regex", "choice") if (value := getattr(options, name)) not in (None, [])}
    if options.schema is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": _json_in(options.schema)}}
    if options.json_object:
        fields["response_format"] = {"type": "json_object"}
    if options.grammar is not None:
        fields["grammar"] = _text_in(options.grammar)
    if options.tools is not None:
        fields["tools"] = _json_in(options.tools)
    if options.tool_choice is not None:
        is_word = options.tool_choice in ("auto", "required", "none")
        named = {"type": "function", "function": {"name": options.tool_choice}}
        fields["tool_choice"] = options.tool_choice if is_word else named
    return fields


def thinking_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the request fields that these flags mean."""
    fields: dict[str, Any] = {}
    if options.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": options.thinking == "on"}
    given = {"max_tokens": options.thinking_budget, "effort": options.effort}
    if wanted := {name: value for name, value in given.items() if value is not None}:
        fields["reasoning"] = wanted
    return fields


async def print_stream(stream: ChunkStream) -> tuple[messages.Chunk, Answer]:
    """Prints an answer as it arrives: its text, and each call as a line of JSON, on standard output, so that it can be
    piped; reasoning, usage, and that its model is being loaded on standard error.

    Returns the terminal and the answer. Raises RequestError if the terminal is an error."""
    builder = AnswerBuilder()
    reasoning, text, load = _Reasoning(), _Lines(sys.stdout), _Load()
    try:
        async for chunk in stream:
            builder.add(chunk)
            if chunk.load_progress is UNSET:
                load.end()
            else:
                load.show(chunk.model or "", chunk.load_progress)
            if chunk.reasoning:
                reasoning.print(chunk.reasoning)
            if chunk.text:
                reasoning.end()
                text.write(chunk.text)
    finally:
        load.end()
        reasoning.end()
        text.end()
    answer = builder.build()
    if answer.text:
        print(flush=True)
    for call in answer.tool_calls:
        print(msgspec.json.encode({"name": call.name, "arguments": call.arguments, "id": call.id}).decode(), flush=True)
    if chunk.error:
        raise errors.RequestError(chunk.error)
    usage, timings = chunk.usage, chunk.timings
    counts = f", {usage.prompt_tokens} + {usage.completion_tokens} tokens" if usage else ""
    if usage and usage.reasoning_tokens:
        counts += f" ({usage.reasoning_tokens} of reasoning)"
    times = f", first after {timings.ttft_ms:.0f} ms, all in {timings.total_ms:.0f} ms" if timings else ""
    by = f", stopped by {chunk.stopped_by}" if chunk.stopped_by else ""
    by_whom = printable(chunk.worker_id or "router")
    print(f"[{chunk.finish_reason}{by}{counts}{times}, {by_whom}]", file=sys.stderr)
    return chunk, answer


def shown(text: str, out: TextIO) -> str:
    """Returns the text as it is written to `out`: a terminal gets pictures of control characters, which could move its
    cursor, write to its clipboard or retitle it. An answer may contain what someone else has written."""
    return text.translate(_SHOWN) if out.isatty() else text


class _Reasoning:
    """Prints reasoning on standard error, dimmed if that is a terminal."""

    def __init__(self) -> None:
        self._is_open = False
        self._marks = (_DIM, _PLAIN) if sys.stderr.isatty() else ("", "")

    def print(self, text: str) -> None:
        if not self._is_open:
            sys.stderr.write(self._marks[0])
            self._lines = _Lines(sys.stderr)
        self._lines.write(text)
        self._is_open = True

    def end(self) -> None:
        if self._is_open:
            self._lines.end()
            print(self._marks[1], file=sys.stderr, flush=True)
            self._is_open = False


class _Load:
    """Says on standard error that an answer's model is being loaded: on a terminal how far, until it is, else once."""

    def __init__(self) -> None:
        self._said = ""

    def show(self, model: str, progress: float) -> None:
        said = f"[waiting: {printable(model)} is being loaded]"
        if sys.stderr.isatty():
            self._said = f"{said[:-1]}, {progress:.0%}]"
            print(_LINE_START, self._said, _LINE_END, sep="", end="", file=sys.stderr, flush=True)
        elif said != self._said:
            self._said = said
            print(said, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._said and sys.stderr.isatty():
            print(_LINE_START, _LINE_END, sep="", end="", file=sys.stderr, flush=True)
        self._said = ""


class _Lines:
    """Writes a text as it arrives. On a terminal, its lines end between words."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._wrap = _make_wrap() if _columns(out) else None

    def write(self, text: str) -> None:
        text = shown(text, self._out)
        self._out.write(text if self._wrap is None else self._wrap.add(text, _columns(self._out)))
        self._out.flush()

    def end(self) -> None:
        if self._wrap is not None:
            self._out.write(self._wrap.end())
            self._out.flush()


def _make_wrap() -> "WordWrap":
    from tokenbus.cli.console.word_wrap import WordWrap  # its table of widths is large, and a pipe needs none

    return WordWrap()


def _columns(out: TextIO) -> int:
    """Returns how wide a terminal is now; 0 if `out` is none, or does not say it."""
    try:
        return os.get_terminal_size(out.fileno()).columns
    except OSError:
        return 0


def _text_in(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start + 1}") from error


def _json_in(path: Path) -> Any:
    try:
        return msgspec.json.decode(_text_in(path))
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
