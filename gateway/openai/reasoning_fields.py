"""Reads how long a model should reason, under all names that clients of OpenAI's API know; pure.

Only `thinking_token_budget` is refused for models whose reasoning can't be closed, as vLLM does. The other names are
hints, as they are to the servers that they come from."""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire import reasoning

_BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
_UNLIMITED = -1


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `reasoning` of a response."""

    effort: str | None = None
    summary: str | None = None


class RequestedReasoning(ReasoningConfig, frozen=True, kw_only=True):
    """The `reasoning` of a request: OpenAI's, and what OpenRouter adds to it."""

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
        """That of llama-server; -1 is no limit."""
        ...

    @property
    def thinking_budget_tokens(self) -> int | None:
        """Another name of the same."""
        ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


class ReasoningWishes:
    """Holds what one body asks for."""

    def __init__(self, body: AsksForReasoning, effort: str | None = None) -> None:
        """`effort` is the one that has a field of its own, which comes first."""
        asked, self._given = body.reasoning or RequestedReasoning(), body.chat_template_kwargs
        self._names = {} if effort is None else {"reasoning.effort": "reasoning_effort"}
        self._effort = effort or ("none" if asked.enabled is False else asked.effort)
        self._budget, self._is_hint = asked.max_tokens, True
        name = next((name for name in _BUDGETS if getattr(body, name) is not None), None)
        if self._budget is None and name is not None:
            budget: int = getattr(body, name)
            self._budget = None if budget == _UNLIMITED else budget
            self._is_hint = name != _BUDGETS[0]
            self._names["reasoning.max_tokens"] = name

    def __repr__(self) -> str:
        return f"<ReasoningWishes {self.options!r}>"

    @property
    def options(self) -> wire.ReasoningOptions | None:
        """The same as the wire has it."""
        if self._effort is None and self._budget is None:
            return None
        is_hint = self._budget is not None and self._is_hint
        return wire.ReasoningOptions(effort=self._effort, max_tokens=self._budget, optional=is_hint or None)

    @property
    def template_arguments(self) -> dict[str, Any] | None:
        """The variables for the chat template."""
        return reasoning.template_arguments(self._effort, self._given)

    @property
    def names(self) -> Mapping[str, str]:
        """The names that fields of the wire have in this body, where they are others."""
        return self._names
