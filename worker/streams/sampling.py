"""Fills in the sampling parameters that a request leaves open, from the model's files and the wire's defaults."""

import secrets
from typing import Any

from tokenbus.protocol.wire import errors, params
from tokenbus.worker import contract


def resolve(
    asked: params.SamplingParams, prompt_tokens: int, config: contract.EngineConfig, max_new_tokens: int
) -> contract.Sampling:
    """Returns the parameters with every default filled in.

    A completion ends at the context in any case. Where neither the request nor the model's files have `max_tokens`, it
    ends after `max_new_tokens` (a setting) at the latest.
    Raises RequestError(prompt_too_long) where not even one token fits after the prompt."""
    left = config.context_length - prompt_tokens
    if left < 1:
        raise errors.request_error(
            errors.Code.PROMPT_TOO_LONG,
            f"the prompt has {prompt_tokens} tokens; with one to generate it must fit {config.context_length}",
        )
    values = _given(params.DEFAULTS) | _given(config.defaults) | _given(asked)
    values["max_tokens"] = min(values.get("max_tokens", max_new_tokens), left)
    values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
    values["logit_bias"] = tuple(sorted((int(token_id), bias) for token_id, bias in (asked.logit_bias or {}).items()))
    return contract.Sampling(**({"seed": secrets.randbits(32)} | values))


def _given(sampling: params.SamplingParams) -> dict[str, Any]:
    values = {name: getattr(sampling, name) for name in params.SamplingParams.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}
