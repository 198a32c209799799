"""The language of chat templates: jinja2 in a sandbox, with the extras that models' templates expect."""

import datetime
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from tokenbus.protocol.prompt.special_tokens import MARKS

_NOT_ASCII = re.compile(f"[^\\x00-\\x7f{MARKS[0]}-{MARKS[-1]}]+")


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training. In a prompt it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def environment() -> SandboxedEnvironment:
    """Returns the environment of one template.

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
