"""The fields by which vLLM, SGLang, llama-server and others extend OpenAI's APIs.

Each is served under its own name, refused unless its value changes nothing, or ignored because no value of it changes
an answer. `tools/known_fields.toml` says which server has which field."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from tokenbus.gateway.openai.fields import CommonFields, WireFields
from tokenbus.gateway.serving.dialect import UnservedField
from tokenbus.gateway.serving.seeds import wire_seed
from tokenbus.protocol.wire import errors, limits
from tokenbus.protocol.wire import messages as wire


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's form of a constraint: one of the fields up to `json_object`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # Refused unless the value changes nothing: UNSERVED says which.
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_additional_properties: Any = None


class ThinkingSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """DeepSeek's and Z.ai's form of what a template's variables say, with Anthropic's budget."""

    type: str | None = None
    """`enabled`, `disabled` or `auto`."""
    clear_thinking: bool | None = None
    """Z.ai's: the variable of this name of the chat template."""
    budget_tokens: int | None = None
    """Another name of `reasoning.max_tokens`."""


class OtherNames(CommonFields, frozen=True, kw_only=True):
    """The fields that are not OpenAI's, beside those that have the wire's names."""

    structured_outputs: StructuredOutputs | None = None
    """This field and those up to `prompt_logprobs` are served: constraints by all their names."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    ebnf: str | None = None
    cache_prompt: bool | None = None
    n_predict: int | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    random_seed: int | None = None
    prompt_logprobs: int | None = None


_ONLY_SAMPLING = "only temperature, top_k, top_p, min_p and the penalties are served"
UNSERVED: dict[str, UnservedField] = {
    "use_beam_search": UnservedField("only sampling is served", (None, False)),
    "include_stop_str_in_output": UnservedField("a stop string is never part of the answer", (None, False)),
    "no_stop_trim": UnservedField("a stop string is never part of the answer", (None, False)),
    "skip_special_tokens": UnservedField("special tokens are never part of the answer's text", (None, True)),
    "truncate_prompt_tokens": UnservedField("a prompt that is too long is refused, never cut"),
    "allowed_token_ids": UnservedField("use logit_bias, choice, regex or grammar", (None, [])),
    "bad_words": UnservedField("use logit_bias, or a regex or grammar without them", (None, [])),
    "stop_regex": UnservedField("use stop, or a regex for the whole answer", (None, [])),
    "logprob_token_ids": UnservedField("use top_logprobs"),
    "return_hidden_states": UnservedField("no states of the model are returned", (None, False)),
    "return_routed_experts": UnservedField("no states of the model are returned", (None, False)),
    "response_fields": UnservedField("responses have all fields", (None, [])),
    "post_sampling_probs": UnservedField("log probabilities are those before sampling", (None, False)),
    "n_probs": UnservedField("use logprobs", (None, 0)),
    "watermarking": UnservedField("answers have no watermark", (None, False)),
    "repetition_detection": UnservedField("use repetition_penalty"),
    "custom_logit_processor": UnservedField("no code of clients is run"),
    "custom_params": UnservedField("no code of clients is run", (None, {})),
    "vllm_xargs": UnservedField("there are no extensions", (None, {})),
    "lora_path": UnservedField("name an adapter in the model: MODEL:ADAPTER"),
    "lora": UnservedField("name an adapter in the model: MODEL:ADAPTER", (None, [])),
    "session_params": UnservedField("use session_id", (None, {})),
    "kv_transfer_params": UnservedField("the router decides which worker computes a prompt", (None, {})),
    "ec_transfer_params": UnservedField("the router decides which worker computes a prompt", (None, {})),
    "guided_whitespace_pattern": UnservedField("whitespace in JSON is as the model likes it"),
    "structural_tag": UnservedField("use tools, regex or grammar"),
    "structured_outputs.structural_tag": UnservedField("use json, regex, choice or grammar"),
    "structured_outputs.whitespace_pattern": UnservedField("whitespace in JSON is as the model likes it"),
    "structured_outputs.disable_additional_properties": UnservedField(
        "objects are closed unless their schema says otherwise", (None, False)
    ),
    "mirostat": UnservedField(_ONLY_SAMPLING, (None, 0)),
    "typical_p": UnservedField(_ONLY_SAMPLING, (None, 1)),
    "tfs_z": UnservedField(_ONLY_SAMPLING, (None, 1)),
    "top_n_sigma": UnservedField(_ONLY_SAMPLING, (None, -1, 0)),
    "xtc_probability": UnservedField(_ONLY_SAMPLING, (None, 0)),
    "dry_multiplier": UnservedField(_ONLY_SAMPLING, (None, 0)),
    "dynatemp_range": UnservedField(_ONLY_SAMPLING, (None, 0)),
    "adaptive_target": UnservedField(_ONLY_SAMPLING, (None, -1)),
    "samplers": UnservedField("the order of the samplers is fixed", (None, [])),
    "n_indent": UnservedField("use a regex or grammar", (None, 0)),
    "t_max_predict_ms": UnservedField("use timeout_ms or max_tokens", (None, 0)),
}
_PARAMETER = "a parameter of a sampler that is refused unless it is off"
_PLACE = "a hint of where the other server runs the request"
_REPORT = "asks for more about the request than its answer"
IGNORED: dict[str, str] = {
    "user": "a name for abuse reports",
    "length_penalty": _PARAMETER,
    "mirostat_tau": _PARAMETER,
    "mirostat_eta": _PARAMETER,
    "xtc_threshold": _PARAMETER,
    "dry_base": _PARAMETER,
    "dry_allowed_length": _PARAMETER,
    "dry_penalty_last_n": _PARAMETER,
    "dry_sequence_breakers": _PARAMETER,
    "dynatemp_exponent": _PARAMETER,
    "adaptive_decay": _PARAMETER,
    "truncation_side": "a parameter of truncate_prompt_tokens, which is refused",
    "spaces_between_special_tokens": "a parameter of skip_special_tokens: false, which is refused",
    "routed_experts_prompt_start": "a parameter of return_routed_experts, which is refused",
    "routed_experts_start_len": "a parameter of return_routed_experts, which is refused",
    "min_keep": "a limit of llama.cpp's own samplers that the ones here keep: at least one token",
    "stream_options.include_obfuscation": "events are not padded",
    "response_format.json_schema.name": "a name for the client's own use",
    "response_format.json_schema.description": "schemas are not shown to the model",
    "structured_outputs.disable_any_whitespace": "whitespace in JSON is as the model likes it",
    "structured_outputs.disable_fallback": "which library constrains an answer is no matter of the request",
    "guided_decoding_backend": "which library constrains an answer is no matter of the request",
    "request_id": "the header X-Request-ID names requests",
    "rid": "the header X-Request-ID names requests",
    "extra_key": "cache_salt keeps caches apart",
    "custom_labels": _REPORT,
    "return_cached_tokens_details": _REPORT,
    "timings_per_token": _REPORT,
    "return_tokens": _REPORT,
    "return_token_offsets": _REPORT,
    "return_mm_kwargs": _REPORT,
    "stream_interval": "events are sent as the model generates",
    "n_keep": "a prompt that is too long is refused, never cut",
    "n_discard": "a prompt that is too long is refused, never cut",
    "n_cache_reuse": "prefixes are reused block by block",
    "id_slot": _PLACE,
    "images_config": "there are no images",
    "bootstrap_host": _PLACE,
    "bootstrap_port": _PLACE,
    "bootstrap_room": _PLACE,
    "routed_dp_rank": _PLACE,
    "disagg_prefill_dp_rank": _PLACE,
    "data_parallel_rank": _PLACE,
    "ngram_corpus_id": "what a server guesses ahead with changes no answer",
    "speculative": "what a server guesses ahead with changes no answer",
}
"""Fields of all endpoints that generate and that change no answer, with the reason."""


class _Constraint(NamedTuple):
    place: str
    field: str
    """The wire's."""
    value: Any


def translated(body: OtherNames) -> WireFields:
    """Returns the wire's fields that a body sets under other names. Raises RequestError for several constraints, and
    for a field that has two names with different values."""
    constraint, numbers = _constraint(body), _numbers(body)
    return WireFields(constraint.fields | numbers.fields, constraint.names | numbers.names)


def _constraint(body: OtherNames) -> WireFields:
    found = [one for one in _constraints(body) if one.value is not None]
    for place, value in (*((one.place, one.value) for one in found), ("regex", body.regex), ("choice", body.choice)):
        if value in ("", []):  # only of `grammar`, llama-server's name, does an empty text mean none
            raise errors.invalid_field(place, "must not be empty: leave it out for an answer without a constraint")
    if not found:
        return WireFields({}, {})
    if len(found) > 1:
        raise errors.invalid_field(
            found[1].place, f"can't be combined with {found[0].place}: one constraint is allowed"
        )
    place, field, value = found[0]
    if getattr(body, field) is not None:
        raise errors.invalid_field(place, f"is another name of {field}: give one of them")
    return WireFields({field: value}, {field: place, f"{field}.json_schema.schema": place})


def _constraints(body: OtherNames) -> Iterator[_Constraint]:
    for name in ("guided_json", "json_schema"):
        yield _Constraint(name, "response_format", json_format(name, getattr(body, name)))
    yield _Constraint("guided_regex", "regex", body.guided_regex)
    yield _Constraint("guided_choice", "choice", body.guided_choice)
    yield _Constraint("guided_grammar", "grammar", body.guided_grammar)
    yield _Constraint("ebnf", "grammar", body.ebnf)
    asked = body.structured_outputs
    if asked is None:
        return
    if not asked.json_object and all(one is None for one in (asked.json, asked.regex, asked.choice, asked.grammar)):
        raise errors.invalid_field("structured_outputs", "needs one of json, json_object, regex, choice and grammar")
    place = "structured_outputs.json"
    yield _Constraint(place, "response_format", json_format(place, asked.json))
    any_json = wire.ResponseFormat(type="json_object") if asked.json_object else None
    yield _Constraint("structured_outputs.json_object", "response_format", any_json)
    for name in ("regex", "choice", "grammar"):
        yield _Constraint(f"structured_outputs.{name}", name, getattr(asked, name))


def json_format(place: str, schema: str | dict[str, Any] | None) -> wire.ResponseFormat | None:
    """Returns the format of a schema, which may be the text of one."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise errors.invalid_field(place, "must be a JSON schema, or the text of one") from error
    if schema is None:
        return None
    return wire.ResponseFormat(type="json_schema", json_schema=wire.JsonSchema(schema=schema))


_ALIASES = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_last_n",
    "random_seed": "seed",
}
_NEWER_NAMES = {"max_tokens": ("max_completion_tokens",)}
"""OpenAI's own newer names, which not all endpoints have."""


def _numbers(body: OtherNames) -> WireFields:
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, field in _ALIASES.items():
        given = getattr(body, name)
        if given is None or (name == "n_predict" and given < 0):  # llama.cpp's -1: no limit
            continue
        if name == "repeat_last_n" and given < 0:  # llama.cpp's -1: the whole context
            given = limits.MAX_TOKENS
        for rival in (field, *_NEWER_NAMES.get(field, ())):
            own = getattr(body, rival, None)
            if own not in (None, given):
                raise errors.invalid_field(name, f"is another name of {rival}, which is {own}")
        fields[field], names[field] = wire_seed(name, given) if field == "seed" else given, name
    return WireFields(fields, names)
