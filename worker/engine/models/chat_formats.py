"""Finds out how a loaded model writes its answers, by its chat template."""

import time
from typing import Any

import structlog

from tokenbus.protocol.prompt import prompt
from tokenbus.protocol.prompt.rendering import PromptPieces
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.messages import ChatMessage
from tokenbus.worker.chat_format.chat_format import ChatFormat
from tokenbus.worker.chat_format.inference.infer import infer_format
from tokenbus.worker.chat_format.known_formats import known_format
from tokenbus.worker.engine.models import features

_CPU_S = 10.0
"""CPU time that all renderings together may take; templates of real models need less than a second, and most of that is
the start of the process. Wall-clock time would make a model's features depend on what else its machine is doing."""
_QUESTION = ChatMessage(role="user", content="What is the weather in Oslo?")
_CALL: dict[str, Any] = {"function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns a forecast.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "days": {"type": "integer", "description": "Number of days"},
            },
        },
    },
}


def infer(rules: prompt.PromptRules) -> ChatFormat | None:
    """Returns the chat format of a model, or None if its template shows neither reasoning nor tool calls.

    Renders in a process of its own, so that a template can neither take long nor do harm."""
    builder = prompt.PromptBuilder(rules, _encode)
    if not builder.supports_chat or rules.chat_template is None:
        return None
    started = time.monotonic()

    def render(
        conversation: list[ChatMessage], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
    ) -> PromptPieces:
        if builder.render_cpu_s > _CPU_S:
            raise TimeoutError
        try:
            return builder.render(conversation, variables, tools)
        except errors.RequestError as error:
            if error.error.code is errors.Code.INTERNAL:  # not refused by the template: it may cost the model a feature
                structlog.get_logger().warning("chat_format_not_rendered", error=error.error.message)
            raise

    try:
        found = infer_format(render, rules.chat_template, rules.special_tokens, known_format(rules.chat_template))
    finally:
        builder.close()
    structlog.get_logger().info(
        "chat_format_inferred",
        offered=list(features.of_format(found)),
        duration_ms=round((time.monotonic() - started) * 1e3),
    )
    return found


def example(rules: prompt.PromptRules) -> str:
    """Returns a call of a tool as the model with these rules would write it, up to the end of its turn."""
    builder = prompt.PromptBuilder(rules, _encode)
    texts = {token: text for text, token in rules.special_tokens.items()}
    answer = ChatMessage(role="assistant", tool_calls=[_CALL])
    try:
        asked, called = (
            "".join(
                piece if isinstance(piece, str) else texts[piece] for piece in builder.render(turns, variables, [_TOOL])
            )
            for turns, variables in (([_QUESTION], {}), ([_QUESTION, answer], {"add_generation_prompt": False}))
        )
    finally:
        builder.close()
    shared = next(
        (at for at, (one, other) in enumerate(zip(asked, called, strict=False)) if one != other),
        min(len(asked), len(called)),
    )
    return called[shared:]


def _encode(text: str) -> list[int]:
    """Formats are found in rendered texts, which nothing tokenizes."""
    raise NotImplementedError
