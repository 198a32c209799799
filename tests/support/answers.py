"""Reads answers with the parser of chat formats, and puts together what it says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tokenbus.worker.chat_format.known_formats import KNOWN_FORMATS, with_tokens
from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.markers import Rules
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.contract.chat_format import ChatFormat

Token = tuple[int, str]
ORDINARY = -1
"""The id of tokens that no format knows."""


class Call(msgspec.Struct):
    """A call, as far as it has been read."""

    name: str
    arguments: str = ""
    id: str = ""
    complete: bool = False


class Answer(msgspec.Struct):
    """All that was said of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = []

    def brief(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.content, self.reasoning, [(call.name, call.arguments) for call in self.calls if call.complete]


def known(name: str, **tokens: int) -> ChatFormat:
    """Returns a known format, with the ids of its special tokens."""
    found = next(one.format for one in KNOWN_FORMATS if one.name == name)
    return with_tokens(found, tokens)


def together(found: Iterable[deltas.Delta]) -> Answer:
    """Puts together what was said, as a client does."""
    answer = Answer(calls=[])
    for one in found:
        match one:
            case deltas.Content(text):
                answer.content += text
            case deltas.ReasoningDelta(text):
                answer.reasoning += text
            case deltas.CallBegin(index, given, name):
                assert index == len(answer.calls)
                answer.calls.append(Call(name, id=given))
            case deltas.CallArguments(index, fragment):
                assert not answer.calls[index].complete
                answer.calls[index].arguments += fragment
            case deltas.CallEnd(index):
                answer.calls[index].complete = True
    return answer


def read(
    form: ChatFormat | Rules,
    output: str | Sequence[Token],
    *,
    tools: dict[str, dict[str, object]] | None = None,
    prompt: str | None = None,
    hold: bool = False,
    cut_off: bool = False,
    pieces: int = 0,
) -> Answer:
    """Reads an answer: a text without special tokens, whole or in pieces of a length, or tokens, one by one."""
    parser = AnswerParser(
        form if isinstance(form, Rules) else Rules(form),
        tools={} if tools is None else tools,
        key="request",
        generation_prompt=prompt,
        hold_calls=hold,
    )
    if isinstance(output, str):
        size = pieces or max(len(output), 1)
        found = [one for at in range(0, len(output), size) for one in parser.feed_text(output[at : at + size])]
    else:
        found = [one for token, text in output for one in parser.feed(token, text)]
    return together(found + parser.finish(cut_off=cut_off))
