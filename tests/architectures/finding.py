"""The result of trying one architecture."""

import enum

import msgspec


class Outcome(enum.Enum):
    """Whether models of an architecture are served, and how their prefixes are reused."""

    CELLS = "cells"
    CHECKPOINTS = "checkpoints"
    NO_REUSE = "none"
    REFUSED = "refused"
    DIED = "died"
    """The engine's process ended."""
    NOT_WRITTEN = "no tiny model"


class Finding(msgspec.Struct, frozen=True):
    """`reason` says what is wrong; it is empty if nothing is."""

    outcome: Outcome
    reason: str = ""
    cached_tokens: int = 0
    """Tokens of twelve prompts that were not computed again."""
    apart: bool = False
    """Whether each sequence is computed in a batch of its own."""
