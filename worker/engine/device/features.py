"""Finds out what a loaded model can do: how it writes its answers, and the features that follow from that."""

import time
from typing import Any

import msgspec
import structlog

from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.prompt.rendering import PromptPieces, Renderer
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.messages import ChatMessage
from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.chat_format.infer import infer_format
from tokenbus.worker.chat_format.known_formats import known_format
from tokenbus.worker.chat_format.probe import Render
from tokenbus.worker.chat_format.reasoning_budget import ReasoningCloser
from tokenbus.worker.contract.chat_format import ChatFormat
from tokenbus.worker.engine.constraints.compiler import ModelTokens, PartEncoder

_FEATURES = (
    "generate",
    "chat",
    "continue_final_message",
    "stop",
    "seed",
    "return_token_ids",
    "logprobs",
    "prompt_logprobs",
    "penalties",
    "logit_bias",
    "progress",
    "structured_output",
    "grammar",
    "fim",
    "cache_control",
)
_CONSTRAINED = ("structured_output", "grammar")
_MAX_ERROR_CHARS = 300
_CPU_S = 2.0
"""CPU time that all renderings together may take, including the start of their process; a starting worker is delayed by
no more. Templates of real models need a quarter of a second. Wall-clock time would make a model's features depend on
what else its machine is doing."""
_MIN_CPU_S = 0.2
"""With less than this left, no further process is started: its start alone would use it up."""
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


def with_sampler(
    *,
    chat: bool,
    ends: bool,
    fim: bool,
    chat_format: ChatFormat | None,
    lora: bool = False,
    caches: bool = True,
    closes_reasoning: bool = False,
) -> tuple[str, ...]:
    """Returns the features; `chat` says whether the model has a chat template, `ends` whether it has an end token,
    without which a constrained output could not end, `fim` whether it can fill in the middle, `lora` whether the
    engine can load adapters, `caches` whether it reuses prefixes, and `closes_reasoning` whether it can close
    reasoning."""
    missing = [
        *([] if chat else ["chat", "continue_final_message"]),
        *([] if fim else ["fim"]),
        *([] if ends else _CONSTRAINED),
    ]
    missing += [] if caches else ["cache_control"]
    found = (*_FEATURES, "lora") if lora else _FEATURES
    added = ("reasoning_budget",) if closes_reasoning else ()
    return (*(feature for feature in found if feature not in missing), *of_format(chat_format), *added)


def of_format(chat_format: ChatFormat | None) -> tuple[str, ...]:
    """Returns the features that follow from knowing a model's chat format."""
    if chat_format is None:
        return ()
    return (*(("tools",) if chat_format.calls is not None else ()), *(("reasoning",) if chat_format.reasons else ()))


def infer_chat_format(rules: tokenizer_bundle.PromptRules) -> ChatFormat | None:
    """Returns the chat format of a model, or None if its template shows neither reasoning nor tool calls.

    Renders in a separate process, so that a template can neither take long nor do harm."""
    source = rules.chat_template
    if not source:
        return None
    started = time.monotonic()
    renderer = Renderer(prompt.renderer_setup(rules, source, all_cpu_s=_CPU_S))

    def tell(error: Exception) -> None:
        structlog.get_logger().warning("chat_format_failed", error=repr(error)[:_MAX_ERROR_CHARS])

    try:
        found = infer_format(_bounded(renderer), source, rules.special_tokens, known_format(source), tell)
        if found is not None:
            found = msgspec.structs.replace(found, takes_effort="reasoning_effort" in source)
    finally:
        renderer.close()
    if found is None and _is_spent(renderer):
        structlog.get_logger().warning("chat_format_given_up", error=f"its renderings take more than {_CPU_S:g} s")
    structlog.get_logger().info(
        "chat_format_inferred",
        offered=list(of_format(found)),
        duration_ms=round((time.monotonic() - started) * 1e3),
    )
    return found


def _bounded(renderer: Renderer) -> Render:
    """Returns a renderer that raises once its CPU time is spent."""

    def render(
        conversation: list[ChatMessage], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
    ) -> PromptPieces:
        if _is_spent(renderer):
            raise TimeoutError
        try:
            return renderer.render(conversation, variables, tools)
        except errors.RequestError as error:
            if error.error.code is errors.Code.INTERNAL:  # not refused by the template: it may cost the model a feature
                structlog.get_logger().warning("chat_format_not_rendered", error=error.error.message)
            raise

    return render


def _is_spent(renderer: Renderer) -> bool:
    return renderer.cpu_s > _CPU_S - _MIN_CPU_S


def example_call(rules: tokenizer_bundle.PromptRules) -> str:
    """Returns a tool call as the model with these rules would write it, up to the end of its turn."""
    renderer = Renderer(prompt.renderer_setup(rules, rules.chat_template or ""))
    texts = {token: text for text, token in rules.special_tokens.items()}
    answer = ChatMessage(role="assistant", tool_calls=[_CALL])
    try:
        asked, called = (
            "".join(
                piece if isinstance(piece, str) else texts[piece]
                for piece in renderer.render(turns, variables, [_TOOL])
            )
            for turns, variables in (([_QUESTION], {}), ([_QUESTION, answer], {"add_generation_prompt": False}))
        )
    finally:
        renderer.close()
    shared = next(
        (at for at, (one, other) in enumerate(zip(asked, called, strict=False)) if one != other),
        min(len(asked), len(called)),
    )
    return called[shared:]


def closer_of(chat_format: ChatFormat | None, model: ModelTokens, missing: dict[str, str]) -> ReasoningCloser | None:
    """Returns what closes the reasoning of a model's answers, or None if nothing does.

    Then `missing` says why, if the model reasons."""
    if chat_format is None or not chat_format.reasons:
        return None
    parts = PartEncoder(model)
    closer = ReasoningCloser(ChatRules(chat_format, model.token_bytes), lambda text: parts.encode(text.encode()))
    if closer.can_close(model.end_token_ids):
        return closer
    missing["reasoning_budget"] = "no tokens close its reasoning without ending the answer"
    return None
