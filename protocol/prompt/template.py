"""Renders a conversation with the model's own chat template."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from tokenbus.protocol.prompt import answer_form, history, sandbox
from tokenbus.protocol.prompt.special_tokens import MARKS, Marks, SpecialTokens
from tokenbus.protocol.wire import errors, limits, messages


class _TemplateRefusalError(Exception):
    """A template raised an exception; this carries its message."""


class ChatTemplate:
    """One model's chat template, compiled once."""

    def __init__(self, source: str, special: SpecialTokens, bos_token: str, eos_token: str) -> None:
        """Raises ValueError if the template is too large or malformed."""
        _check_size(source)
        self._special = special
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = sandbox.environment().from_string(source)
        except Exception as error:  # jinja2 compiles to Python, whose compiler raises errors of its own
            raise ValueError(f"the chat template is malformed: {error}") from error

    def __repr__(self) -> str:
        return f"<ChatTemplate {self._special!r}>"

    def render(
        self,
        conversation: list[messages.ChatMessage],
        arguments: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[str | int]:
        """Returns the prompt as special token ids and plain texts. Raises RequestError(invalid_request) if it fails.

        `arguments` are extra variables for the template (`chat_template_kwargs`)."""
        form = self._answer_form if history.needs_form(conversation) else history.USUAL_FORM
        prepared = history.message_dicts(conversation, form)
        try:
            return self._render(prepared, arguments or {}, tools)
        except _TemplateRefusalError as error:
            raise _refused(f"the model's chat template refused the messages: {error}") from error

    @functools.cached_property
    def _answer_form(self) -> history.AnswerForm:
        return answer_form.find(self._render_probe)

    def _render_probe(self, conversation: list[history.MessageDict]) -> str | None:
        try:
            pieces = self._render(conversation, {}, answer_form.TOOLS)
        except _TemplateRefusalError:
            return None
        return "".join(piece if isinstance(piece, str) else "\0" for piece in pieces)

    def _render(
        self,
        conversation: list[history.MessageDict],
        arguments: Mapping[str, Any],
        tools: list[dict[str, Any]] | None,
    ) -> list[str | int]:
        # The marks must not occur in anything that can end up in the prompt, including the template's own text.
        marks = _unused_marks([self._source, conversation, arguments, tools])
        completed = self._escape([_complete(tool) for tool in tools or []], marks)
        variables = {
            "add_generation_prompt": True,
            # Firefunction's names for the tools, and for the time.
            "functions": sandbox.to_json([tool["function"] for tool in completed], indent=4),
            "datetime": sandbox.strftime_now("%Y-%m-%d %H:%M:%S"),
            # These come before everything that a request must not replace.
            **{name: self._escape(value, marks) for name, value in arguments.items()},
            "messages": self._escape(conversation, marks),
            **self._tokens,
        }
        if tools:
            variables["tools"] = completed
        try:
            text = self._template.render(variables)
        except Exception as error:  # a template is a program: with the right messages it can fail in any way
            raise _TemplateRefusalError(marks.remove(str(error) or repr(error))) from error
        return self._special.split(text, marks)

    def _escape(self, value: Any, marks: Marks) -> Any:
        if isinstance(value, str):
            return self._special.seal(self._special.mark(value, marks), marks)
        if isinstance(value, dict):
            # Keys are marked but not sealed: templates look values up by their keys.
            return {
                self._special.mark(key, marks) if isinstance(key, str) else key: self._escape(child, marks)
                for key, child in value.items()
            }
        if isinstance(value, list):
            return [self._escape(child, marks) for child in value]
        return value


def check(source: str) -> None:
    """Raises ValueError if a template is too large or malformed. Only parses it, since compiling may be slow."""
    _check_size(source)
    try:
        sandbox.environment().parse(source)
    except Exception as error:  # deep nesting ends in Python's own errors
        raise ValueError(f"the chat template is malformed: {error}") from error


def _check_size(source: str) -> None:
    if len(source.encode()) > limits.MAX_TEMPLATE_BYTES:
        raise ValueError(f"the chat template is larger than {limits.MAX_TEMPLATE_BYTES} bytes")


def _complete(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool with the optional fields that templates read filled in."""
    given = {name: value for name, value in tool["function"].items() if value is not None}
    optional = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return tool | {"function": given | {name: value for name, value in optional.items() if name not in given}}


def _unused_marks(values: object) -> Marks:
    texts = [text for text in _strings(values) if not text.isascii()]
    used: set[str] = set()
    if any(mark in text for mark in MARKS[:2] for text in texts):  # almost never, and checking each character is slow
        used.update(*texts)
    unused = (character for character in MARKS if character not in used)
    guard, separator = next(unused, None), next(unused, None)
    if guard is None or separator is None:
        raise _refused(
            "messages: contain nearly every Egyptian hieroglyph; rendering needs two that they don't contain"
        )
    return Marks(guard, separator)


def _refused(message: str) -> errors.RequestError:
    return errors.request_error(errors.Code.INVALID_REQUEST, message, param="messages")


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _strings(key)
            yield from _strings(child)
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child)
