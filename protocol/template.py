"""Renders a conversation with the model's own chat template, in a sandbox, keeping apart who wrote what.

Special tokens are meant where the template writes them and never where a user did. So every place in a user's text
where a special token begins is marked with a guard character before rendering, and a marked place is no special token.
"""

import datetime
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol import errors, limits, messages, request

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that Unicode reserves for a program's own use: never part of a text that means something."""


class SpecialTokens:
    """The texts that stand for one token each, and how to find them in a rendered prompt."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = {text: token_id for text, token_id in ids.items() if text}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._any = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._begins = re.compile(f"(?={self._any})")
        self._starts = {text[:length] for text in self.ids for length in range(1, len(text))}
        self._longest = max(map(len, self.ids), default=0)

    def __repr__(self) -> str:
        return f"<SpecialTokens {len(self.ids)}>"

    def mark(self, text: str, guard: str) -> str:
        """`text` with `guard` before every place where a special token begins, or could be completed behind it."""
        marked = self._begins.sub(guard, text)
        ends_in_start = any(text[-length:] in self._starts for length in range(1, min(self._longest, len(text) + 1)))
        return marked + guard if ends_in_start else marked

    def split(self, text: str, guard: str = "\ufdd0") -> list[str | int]:
        """`text` as special token ids and the plain texts between them, without the guards."""
        pieces: list[str | int] = []
        for piece in re.split(f"(?<!{guard})({self._any})", text):
            plain = piece.replace(guard, "")
            if piece in self.ids:
                pieces.append(self.ids[piece])
            elif plain:
                pieces.append(plain)
        return pieces


class ChatTemplate:
    """One model's chat template, compiled once. Raises ValueError for a template that is too large or malformed."""

    def __init__(self, source: str, special: SpecialTokens, bos_token: str, eos_token: str) -> None:
        if len(source.encode()) > limits.MAX_TEMPLATE_BYTES:
            raise ValueError(f"the chat template is larger than {limits.MAX_TEMPLATE_BYTES} bytes")
        self._special = special
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is malformed: {error}") from error

    def __repr__(self) -> str:
        return f"<ChatTemplate {self._special!r}>"

    def render(
        self, conversation: list[messages.ChatMessage], arguments: Mapping[str, Any] | None = None
    ) -> list[str | int]:
        """The prompt as special token ids and plain texts. Raises RequestError(invalid_request) when it fails.

        `arguments` are extra variables for the template (`chat_template_kwargs`)."""
        turns = [_turn(message) for message in conversation]
        guard = _unused_character([turns, arguments])
        written = {
            "add_generation_prompt": True,
            **self._marked(dict(arguments or {}), guard),
            "messages": self._marked(turns, guard),
            **self._tokens,
        }
        try:
            text = self._template.render(written)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise errors.request_error(
                errors.Code.INVALID_REQUEST,
                f"the model's chat template refused the messages: {error}",
                param="messages",
            ) from error
        except RecursionError as error:
            raise errors.request_error(
                errors.Code.INVALID_REQUEST, "the model's chat template recursed too deeply", param="messages"
            ) from error
        return self._special.split(text, guard)

    def _marked(self, value: Any, guard: str) -> Any:
        if isinstance(value, str):
            return self._special.mark(value, guard)
        if isinstance(value, dict):
            return {key: self._marked(child, guard) for key, child in value.items()}
        if isinstance(value, list):
            return [self._marked(child, guard) for child in value]
        return value


def _turn(message: messages.ChatMessage) -> dict[str, Any]:
    turn = {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
    return turn | {"content": request.text_of(message)}


def _unused_character(written: object) -> str:
    used = set().union(*_strings(written))
    for character in _NONCHARACTERS:
        if character not in used:
            return character
    raise _refused("messages: hold every Unicode noncharacter there is")


def _refused(message: str) -> errors.RequestError:
    return errors.request_error(errors.Code.INVALID_REQUEST, message, param="messages")


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _strings(child)
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Unlike jinja2's own filter, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
