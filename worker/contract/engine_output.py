"""The parts of a generation, as an engine hands them out."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tokenbus.protocol.wire import errors, messages


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural log probability of a sampled token, and those of the likeliest tokens, before any sampling."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class FirstTokenStats(msgspec.Struct, frozen=True, kw_only=True):
    """The account of how a generation reached its first token."""

    cached_tokens: int = 0
    """Prompt tokens that were cached."""
    queue_ms: float = 0.0
    """Time from the accept to the first step."""
    prefill_ms: float = 0.0
    """Time from the first step to the first token."""


class ToolCallPart(NamedTuple):
    """The next part of a tool call."""

    call: int
    """The index of the call within the answer."""
    arguments: str = ""
    """More of its arguments."""
    id: str = ""
    """The call's id, in its first part."""
    name: str = ""
    """The function's name, in its first part."""


class AnswerParts(NamedTuple):
    """Parts of an answer that are not its text."""

    reasoning: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a generation; the one with a `finish_reason` is the terminal."""

    token_ids: list[int] = []
    text: str = ""
    reasoning: str = ""
    """More of the reasoning, which is not part of the text."""
    tool_calls: tuple[ToolCallPart, ...] = ()
    """New tool calls, and more of the last one: at most one part per call."""
    finish_reason: messages.FinishReason | None = None
    stop_match: str | int | None = None
    error: errors.Error | None = None
    usage: messages.Usage | None = None
    timings: messages.Timings | None = None
    gaps: list[int] = []
    """With the last output: how many times between two outputs were below 1 ms, 2, 4, 8 and so on."""
    logprobs: list[Logprob] = []
    """One for each of `token_ids`, if the request asked for them; for resumed tokens, only those of the last ones."""
    prompt_offset: int = 0
    """The position of the first token of `prompt_logprobs`."""
    prompt_logprobs: bytes = b""
    """Log probabilities of the next tokens of the prompt, packed (prompt_logprobs.py); such an output has no tokens."""
    num_scored: int = 0
    """The number of these tokens."""
    progress: messages.Progress | None = None
    """The progress of the prompt; such an output has no tokens."""
    is_constraint_ready: bool = False
    """Whether it says that the request's constraint is compiled; such an output has no tokens."""
    first_token: FirstTokenStats | None = None
    """Set with the first token that this engine samples, unless it continues a completion."""
    resumed_texts: list[str] | None = None
    """The text of each token, if they are those of `EngineRequest.resumed`, which the client has already."""
    resumed_parts: dict[int, AnswerParts] = {}
    """The reasoning and tool calls that came with resumed tokens, by the token's index among them."""

    is_plain: bool = False
    """Whether its maker knows that it is tokens and their text, and nothing else. Most outputs are, and take a shorter
    way."""

    @property
    def is_resumed(self) -> bool:
        """Whether it carries the resumed tokens of a completion rather than new ones."""
        return self.resumed_texts is not None


Sink = Callable[[Output], None]
