"""Decides how the answer to a request is parsed, and what constrains it.

A constraint covers the answer's text, so if the model may reason, the reasoning comes before it. Tools that may or must
be called are a separate constraint."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from tokenbus.protocol.wire import errors, internal, tools
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker.chat_format.answer_grammar import calls_grammar, reasoning_grammar
from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.chat_format.lark import GrammarError
from tokenbus.worker.contract import engine_request

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class AnswerRules(NamedTuple):
    """The parsing of an answer, and the constraint on it."""

    parsing: engine_request.OutputParsing | None
    constraint: engine_request.Constraint | None
    forbidden: tuple[int, ...] = ()
    """Forbidden tokens: those that open a call, if no call may be made."""
    reading: engine_request.OutputParsing | None = None
    """The way to parse the answer, even if it is not to be parsed; None where the model's format is unknown."""


def answer_rules(
    run: internal.Run, prompt: Sequence[int], chat: ChatRules | None, *, can_constrain: bool = True
) -> AnswerRules:
    """Raises RequestError for what the chat format, or an engine that can't constrain its output, can't do.

    `chat` is None where the model's format is unknown."""
    asked = run.params
    if not run.is_chat or chat is None:
        return AnswerRules(None, to_constraint(asked))
    callable_tools = _parameters(asked)
    generation_prompt = chat.generation_prompt(prompt)
    parsing = engine_request.OutputParsing(
        tools=callable_tools or None, generation_prompt=generation_prompt, hold_calls=not asked.is_streamed
    )
    constraint = None
    if can_constrain:
        in_reasoning = chat.begins_in_reasoning(generation_prompt)
        constraint = _chat_constraint(asked, callable_tools, chat, in_reasoning=in_reasoning)
    elif callable_tools and asked.tool_choice not in (None, "auto", {}):
        problem = "tool_choice: this engine can't make a model call a tool, only auto and none are served"
        raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="tool_choice")
    return AnswerRules(
        parsing=None if asked.parse_output is False else parsing,
        constraint=constraint,
        forbidden=chat.call_tokens if asked.tools and not callable_tools else (),
        reading=parsing,
    )


def _parameters(asked: GenerationParams) -> dict[str, dict[str, Any]]:
    """Returns the parameters of each tool that may be called."""
    name = tools.chosen_tool(asked.tool_choice)
    functions = [tool["function"] for tool in asked.called_tools]
    return {one["name"]: one.get("parameters") or {} for one in functions if name in (None, one["name"])}


def _chat_constraint(
    asked: GenerationParams, callable_tools: dict[str, dict[str, Any]], chat: ChatRules, *, in_reasoning: bool
) -> engine_request.Constraint | None:
    wanted = to_constraint(asked)
    is_required = bool(asked.tool_choice) and asked.tool_choice != "auto"
    try:
        if callable_tools:
            source = calls_grammar(
                chat.format,
                callable_tools,
                is_required=is_required,
                parallel=asked.parallel_tool_calls is not False,
                in_reasoning=in_reasoning,
                content=None if wanted is None else json.loads(wanted.source),
                strict={one["function"]["name"] for one in asked.called_tools if one["function"].get("strict") is True},
            )
            rule_params = _rule_params(asked, callable_tools)
            if wanted is not None:  # without calls, the answer must match these
                rule_params |= dict.fromkeys(("content", "answer"), wanted.param)
            return engine_request.Constraint(
                kind=engine_request.ConstraintKind.LARK,
                source=source,
                param="tools",
                rule_params=rule_params,
                is_written=True,
            )
        if wanted is None:
            return None
        preamble = reasoning_grammar(chat.format, in_reasoning=in_reasoning)
        return msgspec.structs.replace(wanted, preamble=preamble)
    except GrammarError as error:
        if callable_tools and not is_required and wanted is None:
            return None  # calls are parsed, but can't be enforced
        param = "tools" if callable_tools else "response_format"
        raise errors.request_error(errors.Code.UNSUPPORTED, f"{param}: {error}", param=param) from error


def _rule_params(asked: GenerationParams, callable_tools: Collection[str]) -> dict[str, str]:
    """Returns the fields of the tools from which the rules of `calls_grammar` are made."""
    places = {tool["function"]["name"]: place for place, tool in enumerate(asked.called_tools)}
    return {f"call_{rule}": f"tools[{places[name]}].function.parameters" for rule, name in enumerate(callable_tools)}


def to_constraint(asked: GenerationParams) -> engine_request.Constraint | None:
    """Returns the constraint on the answer's text; None if it may be any text."""
    wanted, kinds = asked.response_format, engine_request.ConstraintKind
    if wanted is not None and wanted.type == "json_object":
        return engine_request.Constraint(kind=kinds.JSON_SCHEMA, source='{"type":"object"}', param="response_format")
    if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is not None:
        source = msgspec.json.encode(wanted.json_schema.schema).decode()
        param = "response_format.json_schema.schema"
        return engine_request.Constraint(kind=kinds.JSON_SCHEMA, source=source, param=param)
    if asked.regex:
        return engine_request.Constraint(kind=kinds.REGEX, source=asked.regex, param="regex")
    if asked.choice:
        source = msgspec.json.encode(asked.choice).decode()
        return engine_request.Constraint(kind=kinds.CHOICE, source=source, param="choice")
    if asked.grammar:
        kind = kinds.GBNF if _GBNF_RULE.search(asked.grammar) else kinds.LARK
        return engine_request.Constraint(kind=kind, source=asked.grammar, param="grammar")
    return None
