"""Turns a run into an engine request, filling in what the client left open from the model's defaults, and decides how
its answer is parsed, and what constrains it. Pure except for the seed, which is random if the client gave none.

A constraint covers the answer's text, so if the model may reason, the reasoning comes before it. Tools that may or must
be called are a separate constraint.
"""

import json
import re
import secrets
from array import array
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from tokenbus.protocol.wire import block_hash, codec, errors, internal, messages, params, reasoning, subjects, tools
from tokenbus.protocol.wire.checks import validation
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker.chat_format.answer_grammar import calls_grammar, reasoning_grammar
from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.chat_format.closed_objects import close_objects
from tokenbus.worker.chat_format.lark import GrammarError
from tokenbus.worker.contract import contract, engine_output, engine_request
from tokenbus.worker.settings.settings import FrontendSettings
from tokenbus.worker.streams import replay_buffer

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
    generation_prompt = chat.continued_prompt() if asked.continue_final_message else chat.generation_prompt(prompt)
    parsing = engine_request.OutputParsing(
        tools=callable_tools or None,
        generation_prompt=generation_prompt,
        continues=bool(asked.continue_final_message),
        hold_calls=not asked.is_streamed,
    )
    constraint = None
    if can_constrain:
        constraint = _chat_constraint(asked, callable_tools, chat, generation_prompt)
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
    asked: GenerationParams, callable_tools: dict[str, dict[str, Any]], chat: ChatRules, generation_prompt: str
) -> engine_request.Constraint | None:
    wanted = to_constraint(asked)
    if asked.continue_final_message and not chat.calls_follow_text:
        callable_tools = {}
    in_reasoning = chat.begins_in_reasoning(generation_prompt)
    may_reason = not reasoning.is_off(asked.reasoning) and not chat.has_reasoned(generation_prompt)
    is_required = bool(asked.tool_choice) and asked.tool_choice != "auto"
    try:
        if callable_tools:
            source = calls_grammar(
                chat.format,
                callable_tools,
                is_required=is_required,
                parallel=asked.parallel_tool_calls is not False,
                in_reasoning=in_reasoning,
                may_reason=may_reason,
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
        if wanted is None or asked.continue_final_message:  # reasoning and headers are in the prompt
            return wanted
        preamble = reasoning_grammar(chat.format, in_reasoning=in_reasoning, may_reason=may_reason)
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
        source = msgspec.json.encode(close_objects(wanted.json_schema.schema or {})).decode()
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


_NEVER = -1e9
"""The bias of forbidden tokens."""


def to_engine_request(
    run: internal.Run,
    config: contract.EngineConfig,
    settings: FrontendSettings,
    chat: ChatRules | None = None,
    adapters: tuple[block_hash.Adapter, ...] = (),
) -> engine_request.EngineRequest:
    """Raises RequestError if the prompt is malformed, or this engine can't serve it. `adapters` are the run's."""
    token_ids = _unpack_token_ids(run.token_ids, "token_ids")
    if not token_ids:
        raise errors.request_error(errors.Code.INVALID_REQUEST, "the prompt has no tokens", param="token_ids")
    if run.resume_from is None and 0 < settings.max_prompt_tokens < len(token_ids):
        raise errors.prompt_not_allowed(len(token_ids), settings.max_prompt_tokens)
    for need in validation.required_run_features(run.params):
        if need.feature not in config.features:
            problem = f"{need.param} is not served by this engine"
            raise errors.request_error(errors.Code.UNSUPPORTED, problem, param=need.param)
    resumed = None if run.resume_from is None else _to_resumed(run.resume_from, run.params, config)
    num_resumed = 0 if resumed is None else len(resumed.token_ids)
    sampling = resolve_sampling(run.params, len(token_ids), config, settings.max_new_tokens, num_resumed)
    rules = answer_rules(run, token_ids, chat, can_constrain="grammar" in config.features)
    if rules.forbidden:
        biases = dict(sampling.logit_bias) | dict.fromkeys(rules.forbidden, _NEVER)
        sampling = codec.replace(sampling, logit_bias=tuple(sorted(biases.items())))
    control = run.params.cache_control
    return engine_request.EngineRequest(
        key=run.request_id,
        token_ids=token_ids,
        sampling=sampling,
        stop=tuple(run.params.stop_strings),
        tenant=subjects.key_to_tenant(run.request_id),
        cache_salt=run.params.cache_salt or "",
        cache_prompt=run.params.cache_prompt is not False,
        session_id=run.params.session_id or "",
        cache_ttl_s=None if control is None else control.ttl_ms / 1e3,
        is_warm_up=run.params.max_tokens == 0,
        priority=run.params.priority or 0,
        expected_cached_tokens=run.expected_cached_tokens,
        adapters=adapters,
        # a continued completion reports no prompt progress
        return_progress=bool(run.params.return_progress) and run.params.is_streamed and run.resume_from is None,
        resumed=resumed,
        parsing=rules.parsing,
        constraint=rules.constraint,
        reasoning_limit=_reasoning_limit(run.params, sampling, rules, config, settings.reasoning_budget_message),
    )


def resolve_sampling(
    requested: params.SamplingParams,
    prompt_tokens: int,
    config: contract.EngineConfig,
    max_new_tokens: int,
    num_resumed: int = 0,
) -> engine_request.Sampling:
    """Fills in what the client left open. Raises RequestError(prompt_too_long) if the context has no room for a token.

    A completion ends at the end of the context in any case. Without `max_tokens` it also ends at the model's own limit
    or, if it has none, at `max_new_tokens`, a setting; but not before the end of the `num_resumed` tokens that it has
    from another worker, whose limit may be higher."""
    left = config.context_length - prompt_tokens
    if left < 1:
        raise errors.prompt_too_long(prompt_tokens, config.context_length)
    values = _given(params.DEFAULTS) | _given(config.defaults) | _given(requested)
    most = max(1, values.get("max_tokens", max_new_tokens))  # 0: the engine samples a token that is never sent
    values["max_tokens"] = min(max(most, num_resumed) if requested.max_tokens is None else most, left)
    values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
    biases = requested.logit_bias or {}
    values["logit_bias"] = tuple(sorted((int(token_id), bias) for token_id, bias in biases.items()))
    return engine_request.Sampling(**({"seed": secrets.randbits(32)} | values))


def sampling_report(sampling: engine_request.Sampling) -> messages.SamplingReport:
    """Returns what a client may learn about the sampling of its request."""
    names = messages.SamplingReport.__struct_fields__
    return messages.SamplingReport(**{name: getattr(sampling, name) for name in names})


def _to_resumed(
    resume_from: internal.RunResume, asked: params.GenerationParams, config: contract.EngineConfig
) -> engine_request.ResumedCompletion:
    """Raises RequestError if the tokens are malformed, or their log probabilities do not belong to them."""
    token_ids = _unpack_token_ids(resume_from.token_ids, "resume_from.token_ids")
    logprobs = [] if asked.logprobs is None else _unpack_logprobs(resume_from.logprobs, asked.logprobs, config)
    if [one.token_id for one in logprobs] != token_ids[len(token_ids) - len(logprobs) :].tolist():
        raise errors.invalid_field("resume_from.logprobs", "must be those of the last tokens")
    if asked.logprobs is not None and not asked.is_streamed and len(logprobs) < len(token_ids):
        raise errors.invalid_field("resume_from.logprobs", "must be those of all tokens for a whole answer")
    return engine_request.ResumedCompletion(
        token_ids=token_ids,
        logprobs=logprobs,
        cached_tokens=resume_from.cached_tokens,
        queue_ms=resume_from.queue_ms,
        prefill_ms=resume_from.prefill_ms,
        elapsed_ms=resume_from.elapsed_ms,
    )


def _reasoning_limit(
    asked: params.GenerationParams,
    sampling: engine_request.Sampling,
    rules: AnswerRules,
    config: contract.EngineConfig,
    message: str,
) -> engine_request.ReasoningLimit | None:
    chat_format = config.chat_format
    if rules.reading is None or chat_format is None or validation.REASONING_BUDGET not in config.features:
        return None
    most = reasoning.token_limit(asked.reasoning, sampling.max_tokens, takes_effort=chat_format.takes_effort)
    if most is None:
        return None
    return engine_request.ReasoningLimit(max_tokens=most, parsing=rules.reading, message=message)


def _unpack_token_ids(packed: bytes, param: str) -> "array[int]":
    try:
        return block_hash.unpack_token_ids(packed)
    except ValueError as error:
        raise errors.request_error(errors.Code.INVALID_REQUEST, str(error), param=param) from error


def _unpack_logprobs(
    packed: bytes, num_alternatives: int, config: contract.EngineConfig
) -> list[engine_output.Logprob]:
    try:
        logprobs = replay_buffer.unpack_foreign_logprobs(packed, min(num_alternatives, config.vocab_size))
    except ValueError as error:
        raise errors.invalid_field("resume_from.logprobs", str(error)) from error
    if any(token_id >= config.vocab_size for one in logprobs for token_id, _ in one.top):
        raise errors.invalid_field("resume_from.logprobs", "names a token outside the vocabulary")
    return logprobs


def _given(sampling: params.SamplingParams) -> dict[str, Any]:
    """Returns the parameters that are not None, by name."""
    values = {name: getattr(sampling, name) for name in params.SamplingParams.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}
