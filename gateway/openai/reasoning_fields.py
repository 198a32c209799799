"""Reads how long a model should reason, under all names used by clients of OpenAI's API.

Only `thinking_token_budget` is refused for models whose reasoning can't be closed, as vLLM does. The other names are
hints, as in the servers that they come from."""

from typing import Any, NamedTuple, Protocol

import msgspec

from tokenbus.protocol.wire import errors, limits, reasoning
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.params import Range

BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
"""vLLM's and llama-server's names for `reasoning.max_tokens`."""
_UNLIMITED = -1
ALLOWED = Range(_UNLIMITED, limits.MAX_TOKENS)
"""The budgets under these names."""


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `reasoning` of a response."""

    effort: str | None = None
    summary: str | None = None


class RequestedReasoning(ReasoningConfig, frozen=True, kw_only=True):
    """The `reasoning` of a request: OpenAI's, with OpenRouter's additions."""

    max_tokens: int | None = None
    enabled: bool | None = None
    """false: the effort is `none`."""


class AsksForReasoning(Protocol):
    """A body with these fields."""

    @property
    def reasoning(self) -> RequestedReasoning | None: ...

    @property
    def thinking_token_budget(self) -> int | None:
        """The `reasoning.max_tokens` of vLLM; -1 is no limit."""
        ...

    @property
    def reasoning_budget_tokens(self) -> int | None:
        """llama-server's; -1 is no limit."""
        ...

    @property
    def thinking_budget_tokens(self) -> int | None:
        """Another name for the same."""
        ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


class ReasoningWishes(NamedTuple):
    """The same in the wire's form."""

    options: wire.ReasoningOptions | None
    template_arguments: dict[str, Any] | None
    """Variables for the chat template."""
    names: dict[str, str]
    """The body's names for wire fields, where they differ."""


def read_wishes(body: AsksForReasoning, effort: str | None = None) -> ReasoningWishes:
    """Returns what a body asks for; an `effort` given in a separate field takes precedence.

    Raises RequestError for an invalid budget."""
    asked = body.reasoning or RequestedReasoning()
    names = {} if effort is None else {"reasoning.effort": "reasoning_effort"}
    effort = effort or ("none" if asked.enabled is False else asked.effort)
    budget, is_hint = asked.max_tokens, True
    given = [(name, value) for name in BUDGETS if (value := getattr(body, name)) is not None]
    for name, value in given:
        if not ALLOWED.contains(value):
            raise errors.invalid_field(name, f"must be {ALLOWED}, got {value}")
    if budget is None and given:
        name, value = given[0]
        budget, is_hint = None if value == _UNLIMITED else value, name != BUDGETS[0]
        names["reasoning.max_tokens"] = name
    options = None
    if effort is not None or budget is not None:
        is_optional = True if budget is not None and is_hint else None
        options = wire.ReasoningOptions(effort=effort, max_tokens=budget, optional=is_optional)
    return ReasoningWishes(options, reasoning.template_arguments(effort, body.chat_template_kwargs), names)
