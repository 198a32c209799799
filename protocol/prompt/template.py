"""Renders a conversation with the model's own chat template."""

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from tokenbus.protocol.prompt import history
from tokenbus.protocol.prompt.history import AnswerForm, Beside, MessageDict
from tokenbus.protocol.prompt.special_tokens import MARKS, Marks, SpecialTokens
from tokenbus.protocol.prompt.tools_as_text import as_text
from tokenbus.protocol.wire import errors, limits, messages
from tokenbus.protocol.wire.messages import ChatMessage

_NOT_ASCII = re.compile(f"[^\\x00-\\x7f{MARKS[0]}-{MARKS[-1]}]+")
_ARGUMENTS = {"first_probe": "second_probe"}
_CONTENT, _REASONING = "third_probe", "fourth_probe"
_CALL: dict[str, Any] = {"function": {"name": "probe", "arguments": _ARGUMENTS}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "probe"}}]
"""The tools with which the answers are rendered."""
_TOOL_NAMES = {"tools", "functions"}
"""The variables in which templates find tools."""


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training. In a prompt it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def environment() -> SandboxedEnvironment:
    """Returns the environment of one template: jinja2 in a sandbox, with the extras that models' templates expect.

    Templates may change lists and dicts (Kimi K2 queues ids with `append`), so nothing that outlives one rendering may
    be one: variables are copied for each, and the globals are functions, classes and constants."""
    made = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    made.filters["tojson"] = to_json
    made.globals.update(raise_exception=_raise_exception, strftime_now=strftime_now)
    return made


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Formats a value as JSON. jinja2's own filter would escape characters for HTML.

    The parameters, and their order, are those of the filter that template authors test with (in `transformers`)."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys, default=_to_list
    )
    # The marks must stay unescaped: other non-ASCII characters are escaped as json.dumps would do it.
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _to_list(value: object) -> list[Any]:
    """Turns the results of `map` and `select` into lists, as other implementations of the language do."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


Render = Callable[[list[MessageDict]], str | None]
"""Renders a conversation with TOOLS, with each special token as one character; returns None if the template refuses
it."""


def find_answer_form(render: Render) -> AnswerForm:
    """Returns the form in which a template takes past answers, or the usual one if it renders calls in no form.

    A template is written for one client's messages; it fails on those of others, or silently loses part of them.
    Rendering a known answer in each form shows which one it was written for."""
    # Objects first: a template that is given text often prints it as a JSON string, and still renders. One that needs
    # text fails on an object, or prints it in Python's notation.
    for with_objects in (True, False):
        forms = [AnswerForm(with_objects, empty) for empty in ("", None)]
        shown = {form: text for form in forms if (text := _shown(render, form, _answer())) is not None}
        if shown:
            # Some print "None" where there is no content, others an empty turn: the shorter rendering has neither.
            return _with_words(render, min(shown, key=lambda one: len(shown[one])))
    return history.USUAL_FORM


def _with_words(render: Render, form: AnswerForm) -> AnswerForm:
    """Returns the form, completed with where content and reasoning go beside calls."""
    answer = _answer(content=_CONTENT, reasoning_content=_REASONING)
    forms = [form._replace(beside=beside) for beside in Beside]
    shown = {form: text for form in forms if (text := _shown(render, form, answer)) is not None}
    # A template that omits the content of a message with calls does so by design.
    found = form if form in shown else max(shown, key=lambda one: _CONTENT in shown[one], default=form)
    if _REASONING in shown.get(found, _REASONING):
        return found
    other = found._replace(thinks_in_content=True)
    text = _shown(render, other, answer)
    takes_chunks = text is not None and _REASONING in text and not re.search(r"['\"]thinking['\"]: ", text)
    return other if takes_chunks else found


def _answer(**fields: str) -> ChatMessage:
    return ChatMessage(role="assistant", tool_calls=[_CALL], **fields)


def _shown(render: Render, form: AnswerForm, answer: ChatMessage) -> str | None:
    """Returns a template's rendering of a conversation with an answer; None if it refuses, or omits the call."""
    question, result = ChatMessage(role="user", content="question"), ChatMessage(role="tool", content="result")
    text = render(history.message_dicts([question, answer, result], form))
    if text is None or str(_ARGUMENTS) in text:
        return None
    return text if all(word in text for word in _ARGUMENTS.keys() | _ARGUMENTS.values()) else None


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
            self._template = environment().from_string(source)
        except Exception as error:  # jinja2 compiles to Python, whose compiler raises errors of its own
            raise ValueError(f"the chat template is malformed: {error}") from error

    def __repr__(self) -> str:
        return f"<ChatTemplate {self._special!r}>"

    def render(
        self,
        conversation: list[messages.ChatMessage],
        arguments: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        *,
        continues: bool = False,
    ) -> list[str | int]:
        """Returns the prompt as special token ids and plain texts. Raises RequestError(invalid_request) if it fails.

        `arguments` are extra variables for the template (`chat_template_kwargs`). `continues`: the prompt ends with the
        text of the last message; raises RequestError(unsupported) if the template does not write that text as it is."""
        form = self._answer_form if history.needs_form(conversation) else history.USUAL_FORM
        prepared = history.message_dicts(conversation, form)
        if (tools or history.has_calls(conversation)) and not self._knows_tools:
            completed = [_complete(tool) for tool in tools or []]
            prepared, tools = as_text(prepared, completed, to_json, takes_system=self._takes_system), None
        try:
            return self._render(prepared, arguments or {}, tools, continues=continues)
        except _TemplateRefusalError as error:
            raise _refused(f"the model's chat template refused the messages: {error}") from error

    @functools.cached_property
    def _answer_form(self) -> history.AnswerForm:
        return find_answer_form(self._render_probe)

    @functools.cached_property
    def _knows_tools(self) -> bool:
        read = meta.find_undeclared_variables(environment().parse(self._source))
        return bool(read & _TOOL_NAMES) or "tool_calls" in self._source

    @functools.cached_property
    def _takes_system(self) -> bool:
        said = self._render_probe([{"role": "system", "content": _CONTENT}, {"role": "user", "content": "question"}])
        return said is not None and _CONTENT in said

    def _render_probe(self, conversation: list[history.MessageDict]) -> str | None:
        try:
            pieces = self._render(conversation, {}, TOOLS)
        except _TemplateRefusalError:
            return None
        return "".join(piece if isinstance(piece, str) else "\0" for piece in pieces)

    def _render(
        self,
        conversation: list[history.MessageDict],
        arguments: Mapping[str, Any],
        tools: list[dict[str, Any]] | None,
        *,
        continues: bool = False,
    ) -> list[str | int]:
        # The marks must not occur in anything that can end up in the prompt, including the template's own text.
        marks = _unused_marks([self._source, conversation, arguments, tools])
        completed = self._escape([_complete(tool) for tool in tools or []], marks)
        said = self._escape(conversation, marks)
        if continues:
            said[-1] = _with_end(said[-1], marks.end)
        variables = {
            "add_generation_prompt": not continues,
            # Firefunction's names for the tools, and for the time.
            "functions": to_json([tool["function"] for tool in completed], indent=4),
            "datetime": strftime_now("%Y-%m-%d %H:%M:%S"),
            # These come before everything that a request must not replace.
            **{name: self._escape(value, marks) for name, value in arguments.items()},
            "messages": said,
            **self._tokens,
        }
        if tools:
            variables["tools"] = completed
        try:
            text = self._template.render(variables)
        except Exception as error:  # a template is a program: with the right messages it can fail in any way
            raise _TemplateRefusalError(marks.remove(str(error) or repr(error))) from error
        return self._special.split(_until_end(text, said[-1], marks) if continues else text, marks)

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
        environment().parse(source)
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


def _with_end(message: history.MessageDict, end: str) -> history.MessageDict:
    """Returns a message with a mark after its text."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + end}
    *others, last = content
    return message | {"content": [*others, last | {"text": last["text"] + end}]}


def _until_end(text: str, message: history.MessageDict, marks: Marks) -> str:
    """Returns a rendered prompt up to the mark after the last message's text.

    Some templates leave the last message out, or write it twice."""
    content = message["content"]
    said = content if isinstance(content, str) else content[-1]["text"]
    before, *after = text.split(marks.end)
    if len(after) != 1 or not before.endswith(said.removesuffix(marks.end).lstrip()):
        problem = "continue_final_message: the model's chat template does not write the last message as it is"
        raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="continue_final_message")
    return before


def _unused_marks(values: object) -> Marks:
    texts = [text for text in _strings(values) if not text.isascii()]
    used: set[str] = set()
    if any(mark in text for mark in MARKS[:3] for text in texts):  # almost never, and checking each character is slow
        used.update(*texts)
    unused = (character for character in MARKS if character not in used)
    found = list(itertools.islice(unused, 3))
    if len(found) < 3:
        raise _refused(
            "messages: contain nearly every Egyptian hieroglyph; rendering needs three that they don't contain"
        )
    return Marks(*found)


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
