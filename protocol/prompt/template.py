"""Renders a conversation with the model's own chat template, in a sandbox, and keeps users' texts apart from markup.

A special token (such as `<|im_end|>`) counts where the template writes it, and never where a user wrote it. So before
rendering, every special token in a user's text gets a guard character in front and a separator character behind, and
what stands between the two is not parsed as a special token. A text that ends like the beginning of a special token
gets a separator too, so that the template can't complete it by what it writes next.
"""

import datetime
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from tokenbus.protocol.prompt import history
from tokenbus.protocol.wire import errors, limits, messages

_MARKS = [chr(code) for code in range(0x13000, 0x13400)]
"""The characters among which guard and separator are chosen: Egyptian hieroglyphs.

They must be printable: a template may print a list as Python does, which would escape other characters."""

_PROBE_ARGUMENTS = {"first_probe": "second_probe"}
_PROBE = [
    messages.ChatMessage(role="user", content="question"),
    messages.ChatMessage(role="assistant", tool_calls=[{"function": {"name": "probe", "arguments": _PROBE_ARGUMENTS}}]),
    messages.ChatMessage(role="tool", content="result"),
]
_PROBE_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "probe"}}]
"""A conversation with a call, by which a template shows in which form it takes the arguments."""
_NOT_ASCII = re.compile(f"[^\\x00-\\x7f{_MARKS[0]}-{_MARKS[-1]}]+")


class _TemplateRefusalError(Exception):
    """A template raised an exception, whose message this has."""


class Marks(NamedTuple):
    """Two characters that occur neither in the request nor in the template."""

    guard: str
    separator: str

    def remove(self, text: str) -> str:
        return text.replace(self.guard, "").replace(self.separator, "")


class SpecialTokens:
    """The texts that stand for one token each; finds them in users' texts and in rendered prompts."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = {text: token_id for text, token_id in ids.items() if text}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._any = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._starts_here = re.compile(f"(?={self._any})")  # a lookahead, so that overlapping tokens are found as well
        self._prefixes = {text[:length] for text in self.ids for length in range(1, len(text))}
        self._longest = max(map(len, self.ids), default=0)

    def __repr__(self) -> str:
        return f"<SpecialTokens {len(self.ids)}>"

    def mark(self, text: str, marks: Marks) -> str:
        """Returns `text` with every special token in it between a guard and a separator, overlapping ones included."""
        # Special tokens may overlap (`<a<a>`), so every position is tried with every token, not only the first match.
        spans = [
            (at, at + len(token))
            for at in {match.start() for match in self._starts_here.finditer(text)}
            for token in self.ids
            if text.startswith(token, at)
        ]
        starts, ends = {start for start, _ in spans}, {end for _, end in spans}
        parts, last = [], 0
        # Where one token ends and another starts, the separator comes first: it closes the one before.
        for at in sorted(starts | ends):
            parts += [text[last:at], marks.separator if at in ends else "", marks.guard if at in starts else ""]
            last = at
        return "".join(parts) + text[last:]

    def seal(self, text: str, marks: Marks) -> str:
        """Returns `text`, with a separator behind it if what follows could complete a special token."""
        is_open = any(text[-length:] in self._prefixes for length in range(1, min(self._longest, len(text) + 1)))
        return text + marks.separator if is_open else text

    def split(self, text: str, marks: Marks) -> list[str | int]:
        """Splits a rendered prompt into special token ids and the plain texts between them, without the marks.

        A special token is the user's only if both marks are there: a guard without its separator is left over where
        the template has cut a user's text short, and what follows it was written by the template."""
        pieces: list[str | int] = []
        # A special token without a guard in front, or with a guard but without a separator behind.
        token = f"((?<!{marks.guard})(?:{self._any})|(?<={marks.guard})(?:{self._any})(?!{marks.separator}))"
        for piece in re.split(token, text):
            plain = marks.remove(piece)
            if piece in self.ids:
                pieces.append(self.ids[piece])
            elif plain:
                pieces.append(plain)
        return pieces


class ChatTemplate:
    """One model's chat template, compiled once."""

    def __init__(self, source: str, special: SpecialTokens, bos_token: str, eos_token: str) -> None:
        """Raises ValueError if the template is too large or malformed."""
        _check_size(source)
        self._special = special
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
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
        with_objects = not history.has_calls(conversation) or self._takes_objects
        prepared = history.message_dicts(conversation, with_objects)
        try:
            return self._render(prepared, arguments or {}, tools)
        except _TemplateRefusalError as error:
            raise _refused(f"the model's chat template refused the messages: {error}") from error

    @functools.cached_property
    def _takes_objects(self) -> bool:
        """Whether past calls have their arguments as objects in this template, or as the JSON texts of the wire.

        Objects are tried first: a template that is given a text often prints it as a JSON string, and still renders.
        One that needs texts fails on an object, or prints it in Python's notation."""
        return self._probe(with_objects=True) or not self._probe(with_objects=False)

    def _probe(self, with_objects: bool) -> bool:
        prepared = history.message_dicts(_PROBE, with_objects)
        try:
            pieces = self._render(prepared, {}, _PROBE_TOOLS)
        except _TemplateRefusalError:
            return False
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        return all(word in text for word in _PROBE_ARGUMENTS) and str(_PROBE_ARGUMENTS) not in text

    def _render(
        self,
        conversation: list[history.MessageDict],
        arguments: Mapping[str, Any],
        tools: list[dict[str, Any]] | None,
    ) -> list[str | int]:
        # The marks must not occur in anything that can end up in the prompt, the template's own text included.
        marks = _unused_marks([self._source, conversation, arguments, tools])
        completed = self._escape([_complete(tool) for tool in tools or []], marks)
        variables = {
            "add_generation_prompt": True,
            # Firefunction's names for the tools, and for the time.
            "functions": _to_json([tool["function"] for tool in completed], indent=4),
            "datetime": _strftime_now("%Y-%m-%d %H:%M:%S"),
            # Before everything that a request must not replace.
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
    """Raises ValueError if a template is too large or malformed. Only parses it, since compiling may take long."""
    _check_size(source)
    try:
        _environment().parse(source)
    except Exception as error:  # deep nesting ends in Python's own errors
        raise ValueError(f"the chat template is malformed: {error}") from error


def _check_size(source: str) -> None:
    if len(source.encode()) > limits.MAX_TEMPLATE_BYTES:
        raise ValueError(f"the chat template is larger than {limits.MAX_TEMPLATE_BYTES} bytes")


def _complete(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool with the fields that it may leave out, and that templates read."""
    given = {name: value for name, value in tool["function"].items() if value is not None}
    optional = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return tool | {"function": given | {name: value for name, value in optional.items() if name not in given}}


def _unused_marks(values: object) -> Marks:
    used = set().union(*_strings(values))
    unused = (character for character in _MARKS if character not in used)
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


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training. In a prompt it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> SandboxedEnvironment:
    """Returns the environment of one template.

    Templates may change lists and dicts (Kimi K2 queues ids with `append`), so nothing that lasts longer than one
    rendering may be one: variables are copied for each, and the globals are functions, classes and constants."""
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _to_json(
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
    # The marks have to stay what they are: everything else that is not ASCII is escaped as json.dumps would do it.
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _to_list(value: object) -> list[Any]:
    """Makes a list of what `map` and `select` return, as other implementations of the language do."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
