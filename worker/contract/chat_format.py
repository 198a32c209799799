"""A chat format says how a model writes its answer: reasoning, text and tool calls, told apart by markers.

One record type describes every family of models. All markers are text. `tokens` lists the markers, or parts of markers,
that are single tokens: `<tool_call>` in the marker `<tool_call>\\n<function=` is matched by its token id if `tokens`
has it, and as text if it does not. An empty marker is not written.

Whitespace that a template writes at the edge of a marker belongs to the marker. So a parser removes it, and tolerates
more or less of it where a model is careless. A marker without whitespace at an edge leaves the text next to it
unchanged.

Decision 0051 says how it is found and who parses answers.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """The ways to write one call."""

    JSON = "json"
    """An object that holds the name and the arguments: `{"name": "f", "arguments": {"a": 1}}`."""
    NAMED = "named"
    """A header with the name, then an object with the arguments: `[TOOL_CALLS]f[ARGS]{"a": 1}`."""
    TAGGED = "tagged"
    """A header with the name, then each argument between its own markers: `<parameter=a>\\n1\\n</parameter>`."""


class Values(StrEnum):
    """The notation of values: of the arguments object in JSON and NAMED calls, of each argument in TAGGED ones."""

    JSON = "json"
    PYTHON = "python"
    """Python literals: `True`, `None`, strings in either quote."""
    BARE_KEYS = "bare_keys"
    """JSON whose keys have no quotes and whose strings have no escapes: `{a:<|"|>x<|"|>,b:[1,true]}`."""
    TEXT = "text"
    """Only in TAGGED calls: strings are written raw, without quotes or escapes, everything else as JSON. Which of the
    two applies follows from the value's type marker (`string_type`), or else from the tool's schema."""


class Calls(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The markers and the notation of tool calls.

    A message's calls are `announce section_open call separator call ... section_close announce_close`; each call is
    `call_open ... call_close`.
    """

    kind: Kind
    values: Values = Values.JSON

    section_open: str = ""
    """Opens all calls of a message, including an array's `[`. Empty: each call stands alone."""
    section_close: str = ""
    section_optional: bool = False
    """Models with this format are known to omit `section_open`: `call_open` then begins a call too."""
    announce: str = ""
    """An optional marker before the calls. Calls without a marker of their own (neither `section_open` nor `call_open`,
    or only an opening bracket) count only after it or at the very beginning of the content, and only if they name one
    of the request's tools."""
    announce_close: str = ""
    """An optional marker after the calls."""

    call_open: str = ""
    """Opens one call, up to its header (NAMED, TAGGED) or its object (JSON)."""
    call_close: str = ""
    separator: str = ""
    """Separates two calls, besides whitespace."""
    parallel: bool = True
    """Whether a message may have more than one call."""

    name_key: str = "name"
    """JSON: the key of the name. Empty: the name is the key and the arguments are its value, `{"f": {"a": 1}}`."""
    arguments_key: str = "arguments"
    """JSON: the key of the arguments. `arguments` and `parameters` are always both understood."""
    id_key: str = ""
    """JSON: the key of the call's id, if it has one."""

    header: str = "{name}"
    """NAMED, TAGGED: the text between `call_open` and `name_close`: the placeholders `{name}`, `{id}` and `{index}` and
    texts around them, all optional except the name: `functions.{name}:{index}`, `{name}[CALL_ID]{id}`."""
    id_form: str = ""
    """Makes the ids of calls written without one from their `{name}` and `{index}`. Empty: any id will do."""
    id_length: int = 0
    """The number of letters and digits an id must have. 0: any number, and other characters too."""
    name_close: str = ""
    """NAMED: precedes the arguments object. TAGGED: precedes the first argument."""

    quote: str = '"'
    """BARE_KEYS: opens and closes a string."""

    argument_open: str = ""
    """TAGGED: opens an argument, up to its key."""
    key_close: str = ""
    """TAGGED: between the key and the value, or between the key and the type."""
    type_close: str = ""
    """TAGGED: between the type and the value. Empty: there is no type."""
    string_type: str = ""
    """TAGGED: the type whose values are raw strings; values of all other types are JSON."""
    value_close: str = ""
    """TAGGED: closes an argument. It counts as the end of a value only if another argument or the end of the call
    follows."""
    argument_separator: str = ""
    """TAGGED: separates two arguments, besides whitespace."""
    keys_escaped: bool = False
    """TAGGED: keys are escaped with `&amp;`, `&quot;`, `&lt;` and `&gt;`."""


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The markers that separate reasoning from the answer."""

    open: str
    close: str
    ended_by_call: bool = False
    """A call inside the reasoning ends it. Without this, all text before `close` is reasoning."""
    switch: str = ""
    """The template variable that turns reasoning on and off, such as `enable_thinking`."""


class Channels(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answers that consist of several messages, each with a header naming its recipient.

    A message is `start (recipient) channel name (recipient) (type) body text end`. The generation prompt holds the
    first `start`.
    """

    start: str
    channel: str
    body: str
    ends: tuple[str, ...]
    recipient: str
    """Precedes the recipient in a header. A message with a recipient is not content."""
    function: str
    """The beginning of a recipient if the message is a call: the rest is the function's name, the body its
    arguments."""
    constrain: str = ""
    """Precedes the type of the body in a header."""
    reasoning: tuple[str, ...]
    """The channels of reasoning."""
    content: tuple[str, ...]
    """The channels of content."""


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's way of writing its answer. Equal formats have equal records."""

    calls: Calls | None = None
    """None: the model calls no tools."""
    reasoning: Reasoning | None = None
    channels: Channels | None = None
    """If set, channels decide what is reasoning and what is a call; `reasoning` is None, and the markers of `calls` are
    empty."""
    content_open: str = ""
    """Opens the content, if the format marks it. It also ends reasoning."""
    content_close: str = ""
    turn_open: str = ""
    """The text that the template writes before an answer, and only there: `<|im_start|>assistant\\n`."""
    generation_prompt: str = ""
    """The text that the template writes by default after `turn_open` when it prompts for an answer: `<think>\\n` means
    that the answer begins inside the reasoning."""
    turn_close: tuple[str, ...] = ()
    """Markers that merely end the answer."""
    tokens: dict[str, int] = {}
    """The ids of all parts of these markers that are single tokens, by their text."""
    takes_effort: bool = False
    """Whether the template reads `reasoning_effort`, so that the model itself adjusts its reasoning."""

    @property
    def reasons(self) -> bool:
        """Whether its answers may contain reasoning."""
        return self.reasoning is not None or (self.channels is not None and bool(self.channels.reasoning))
