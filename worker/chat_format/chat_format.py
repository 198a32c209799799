"""A chat format says how a model writes its answer: reasoning, text and tool calls, told apart by markers.

One record describes every family of models. All markers are texts. Those of them, or those parts of them, that are
tokens of their own stand in `tokens`: `<tool_call>` in the marker `<tool_call>\\n<function=` is matched by its token id
where `tokens` has it, and as text where it does not. An empty marker is not written.

Whitespace that a template writes at the edge of a marker belongs to the marker. A parser therefore removes it, and
removes more of it or finds less where a model is careless. A marker without whitespace at an edge leaves the text next
to it as it is.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """The ways to write one call."""

    JSON = "json"
    """An object that holds the name and the arguments: `{"name": "f", "arguments": {"a": 1}}`."""
    NAMED = "named"
    """A header with the name, then an object of the arguments: `[TOOL_CALLS]f[ARGS]{"a": 1}`."""
    TAGGED = "tagged"
    """A header with the name, then each argument between markers of its own: `<parameter=a>\\n1\\n</parameter>`."""


class Values(StrEnum):
    """The notation of values: of the arguments object of JSON and NAMED calls, of each argument of TAGGED ones."""

    JSON = "json"
    PYTHON = "python"
    """Python literals: `True`, `None`, strings in either quote."""
    BARE_KEYS = "bare_keys"
    """JSON whose keys have no quotes and whose strings have no escapes: `{a:<|"|>x<|"|>,b:[1,true]}`."""
    TEXT = "text"
    """Only of TAGGED calls: strings as they are, without quotes or escapes, everything else as JSON. Which of both a
    value is follows from its type marker (`string_type`), or else from the schema of the tool."""


class Calls(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The markers and the notation of tool calls.

    A message's calls are `announce section_open call separator call ... section_close announce_close`, each call is
    `call_open ... call_close`.
    """

    kind: Kind
    values: Values = Values.JSON

    section_open: str = ""
    """Opens all calls of a message; an array's `[` is part of it. Empty: each call stands alone."""
    section_close: str = ""
    section_optional: bool = False
    """Models of this format are known to leave `section_open` out: `call_open` begins a call without it, too."""
    announce: str = ""
    """A marker that may, and need not, stand before the calls. Calls that have no marker of their own (neither
    `section_open` nor `call_open`, or an opening bracket alone) count only behind it or at the very beginning of the
    content, and only if they name one of the request's tools."""
    announce_close: str = ""
    """May stand behind the calls."""

    call_open: str = ""
    """Opens one call, up to its header (NAMED, TAGGED) or its object (JSON)."""
    call_close: str = ""
    separator: str = ""
    """Stands between two calls, besides whitespace."""
    parallel: bool = True
    """Whether a message may have more than one call."""

    name_key: str = "name"
    """JSON: the key of the name. Empty: the name is the key and the arguments are its value, `{"f": {"a": 1}}`."""
    arguments_key: str = "arguments"
    """JSON: the key of the arguments. `arguments` and `parameters` are both understood in any case."""
    id_key: str = ""
    """JSON: the key of the call's id, if it has one."""

    header: str = "{name}"
    """NAMED, TAGGED: what stands between `call_open` and `name_close`: the places `{name}`, `{id}` and `{index}` and
    texts around them, all of which but the name may be missing: `functions.{name}:{index}`, `{name}[CALL_ID]{id}`."""
    id_form: str = ""
    """The ids of calls that have none of their own, from their `{name}` and `{index}`. Empty: any id will do."""
    id_length: int = 0
    """The number of letters and digits an id must have. 0: any number, and other characters, too."""
    name_close: str = ""
    """NAMED: stands before the object of the arguments. TAGGED: before the first argument."""

    quote: str = '"'
    """BARE_KEYS: opens and closes a string."""

    argument_open: str = ""
    """TAGGED: opens an argument, up to its key."""
    key_close: str = ""
    """TAGGED: between the key and the value, or between the key and the type."""
    type_close: str = ""
    """TAGGED: between the type and the value. Empty: there is no type."""
    string_type: str = ""
    """TAGGED: the type whose values are strings as they are; those of all other types are JSON."""
    value_close: str = ""
    """TAGGED: closes an argument. What a value ends with is only taken for it if another argument or the end of the
    call follows."""
    argument_separator: str = ""
    """TAGGED: stands between two arguments, besides whitespace."""
    keys_escaped: bool = False
    """TAGGED: keys have `&amp;`, `&quot;`, `&lt;` and `&gt;` for the characters themselves."""


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The markers that tell reasoning from the answer."""

    open: str
    close: str
    ended_by_call: bool = False
    """A call inside the reasoning ends it. Without this, all text before `close` is reasoning."""
    switch: str = ""
    """The template's variable that turns reasoning on and off, such as `enable_thinking`."""


class Channels(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answers that consist of several messages, each with a header that says whom it is for.

    A message is `start (recipient) channel name (recipient) (type) body text end`. The generation prompt holds the
    first `start`.
    """

    start: str
    channel: str
    body: str
    ends: tuple[str, ...]
    recipient: str
    """Stands before the recipient in a header. A message that has a recipient is no content."""
    function: str
    """The beginning of a recipient if the message is a call: the rest is the function's name, the body its
    arguments."""
    constrain: str = ""
    """Stands before the type of the body in a header."""
    reasoning: tuple[str, ...]
    """The channels of reasoning."""
    content: tuple[str, ...]
    """The channels of content."""


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's way to write its answer. Equal formats have equal records."""

    calls: Calls | None = None
    """None: the model calls no tools."""
    reasoning: Reasoning | None = None
    channels: Channels | None = None
    """If set, channels decide what is reasoning and what is a call; `reasoning` is None, the markers of
    `calls` are empty."""
    content_open: str = ""
    """Opens the content, where a format marks it. It ends reasoning, too."""
    content_close: str = ""
    turn_open: str = ""
    """The text that the template writes before an answer, and only there: `<|im_start|>assistant\\n`."""
    generation_prompt: str = ""
    """The text that the template writes behind `turn_open` when it asks for an answer, by default: `<think>\\n` says
    that the answer begins inside the reasoning."""
    turn_close: tuple[str, ...] = ()
    """Markers that say no more than that the answer is over."""
    tokens: dict[str, int] = {}
    """The ids of all parts of these markers that are tokens of their own, by their text."""
    takes_effort: bool = False
    """Whether the template reads `reasoning_effort`, so that the model itself reasons more or less."""

    @property
    def reasons(self) -> bool:
        """Whether its answers may have reasoning."""
        return self.reasoning is not None or (self.channels is not None and bool(self.channels.reasoning))
