"""Writes the grammar of an answer with reasoning and tool calls, from a chat format and the tools.

With `auto`, text is free until the marker that opens a call; from there on, everything follows the format and the
tool's schema. With `required`, or with one tool that must be called, the answer is only calls, after the reasoning:

    auto        reasoning?  free text  (opening marker  calls)?
    required    reasoning?  opening marker  calls

Markers that are single tokens are written as token ids, so that no text can be mistaken for them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from tokenbus.worker.chat_format.grammar.call import CallWriter
from tokenbus.worker.chat_format.grammar.lark import GrammarError, LarkWriter, joined, json_of, literal, one_of
from tokenbus.worker.chat_format.grammar.schemas import closed
from tokenbus.worker.contract.chat_format import Calls, Channels, ChatFormat

Tools = Mapping[str, Mapping[str, Any]]


def calls_grammar(
    form: ChatFormat,
    tools: Tools,
    *,
    is_required: bool,
    parallel: bool = True,
    in_reasoning: bool = False,
    content: Mapping[str, Any] | None = None,
    strict: Collection[str] = (),
) -> str:
    """Returns the grammar of an answer that may call these tools, or must if `is_required`.

    `parallel`: it may have more than one call. `in_reasoning`: it begins inside the reasoning. `content`: the JSON
    schema of an answer without calls. `strict` names the tools whose schemas must be followed completely. The rule
    `call_<n>` matches the calls of tool number n. Raises GrammarError."""
    if form.calls is None or not tools:
        raise GrammarError("the model's chat format has no tool calls")
    calls = form.calls if parallel else msgspec.structs.replace(form.calls, parallel=False)
    lark = LarkWriter(form.tokens)
    arguments = {name: closed(schema, is_strict=name in strict) for name, schema in tools.items()}
    free = "TEXT" if content is None else json_of(content)
    if form.channels is not None:
        answer = _messages(lark, form.channels, free)
        lark.add("call", _called_messages(lark, form.channels, arguments))
        return lark.write("message* call" if is_required else f"{answer} | message* call")
    lark.add("content", _content(lark, form, calls, arguments, free, is_required=is_required))
    return lark.write(f"{_reasoning(lark, form, is_open=in_reasoning)} content")


def reasoning_grammar(form: ChatFormat, *, in_reasoning: bool) -> str:
    """Returns the grammar of reasoning, if the model may reason, followed by `@body`; empty if it does not."""
    lark = LarkWriter(form.tokens)
    if form.channels is not None:
        return lark.write(_messages(lark, form.channels, "@body"))
    if form.reasoning is None:
        return ""
    return lark.write(f"{_reasoning(lark, form, is_open=in_reasoning)} {_content_open(lark, form)}@body")


def _reasoning(lark: LarkWriter, form: ChatFormat, *, is_open: bool) -> str:
    reasoning = form.reasoning
    if reasoning is None:
        return ""
    if is_open:
        return lark.text_until(reasoning.close)
    if not reasoning.open.strip():
        return ""
    return f"({lark.marker(reasoning.open.lstrip())} {lark.text_until(reasoning.close)})?"


def _content_open(lark: LarkWriter, form: ChatFormat) -> str:
    return f"({lark.marker(form.content_open.strip())})? " if form.content_open else ""


def _content(lark: LarkWriter, form: ChatFormat, calls: Calls, tools: Tools, free: str, *, is_required: bool) -> str:
    """Returns an expression for an answer after its reasoning; `free` is the answer without calls."""
    opening = joined(calls.section_open, calls.call_open)
    announce = f"({lark.marker(calls.announce.strip())})? " if calls.announce else ""
    closing = f" ({lark.marker(calls.announce_close.strip())})?" if calls.announce_close else ""
    called = f"{_calls(lark, calls, tools)}{closing}"
    marked = f"{announce}{lark.marker(opening.lstrip())} {called}"
    if is_required:
        return marked
    content_open = _content_open(lark, form)
    if free != "TEXT":
        return f"{content_open}{free} | {marked}"
    first = (calls.section_open or calls.call_open).strip()
    if first in ("", "["):  # no marker of its own: a call begins like an answer, and its first character decides
        other = lark.add("FREE", rf"/\s*[^\s{re.escape(first or '{')}](.|\n)*/")
        return f"{announce}{lark.marker(opening)} {called} | {other} | SPACE"
    return f"{content_open}TEXT | {content_open}{lark.text_until(opening)} {called}"


def _calls(lark: LarkWriter, calls: Calls, tools: Tools) -> str:
    """Returns an expression for all calls of an answer after the marker that opens the first one."""
    writer = CallWriter(lark, calls)
    names = [writer.write(f"call_{number}", name, schema) for number, (name, schema) in enumerate(tools.items())]
    lark.add("call", " | ".join(names))
    more = f" ({lark.marker(joined(calls.separator, calls.call_open))} call)*" if calls.parallel else ""
    return f"call{more} {lark.marker(calls.section_close)}".strip()


def _messages(lark: LarkWriter, channels: Channels, last: str) -> str:
    """Returns an expression for messages with headers: any number of them before the last one, whose body is `last`."""
    channel, body = lark.marker(channels.channel), lark.marker(channels.body)
    kinds = one_of([*channels.reasoning, *channels.content])
    lark.add("message", f"{channel} {kinds} {body} TEXT {lark.marker(channels.ends[0])} {lark.marker(channels.start)}")
    lark.add("answer", f"{channel} {one_of(list(channels.content))} {body} {last}")
    return "message* answer"


def _called_messages(lark: LarkWriter, channels: Channels, tools: Tools) -> str:
    """Returns an expression for a message that is a call."""
    constrain = f'{literal(" ")} {lark.marker(channels.constrain)} "json"' if channels.constrain else ""
    found = []
    for number, (name, schema) in enumerate(tools.items()):
        header = literal(f"{channels.content[-1]}{channels.recipient}{channels.function}{name}")
        head = f"{lark.marker(channels.channel)} {header} {constrain} {lark.marker(channels.body)}"
        found.append(lark.add(f"call_{number}", f"{head} {json_of(schema)}"))
    return " | ".join(found)
