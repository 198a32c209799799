"""The pieces of an answer, in the order in which a parser yields them."""

from __future__ import annotations

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More text of the reasoning."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More text of the answer."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call begins: the `index`th of this answer, counted from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments: a call's fragments together form one JSON object."""

    index: int
    fragment: str


class CallEnd(msgspec.Struct, frozen=True):
    """A call is complete. One without an end was cut off or is malformed, and must not be executed."""

    index: int


Delta = ReasoningDelta | Content | CallBegin | CallArguments | CallEnd
