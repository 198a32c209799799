"""Fills in what a request left open, from the model's defaults."""

import secrets
from typing import TypeVar

from tokenbus.protocol.wire import errors, internal
from tokenbus.worker import contract

NumberT = TypeVar("NumberT", int, float)


def resolve(
    params: internal.GenerationParams, prompt_tokens: int, config: contract.EngineConfig, max_new_tokens: int
) -> contract.Sampling:
    """How to sample. Raises RequestError(prompt_too_long) when not even one token fits behind the prompt.

    Without `max_tokens` a completion may fill the context, but be no longer than `max_new_tokens` (a setting); with it,
    it ends at the context all the same."""
    left = config.context_length - prompt_tokens
    if left < 1:
        raise errors.request_error(
            errors.Code.PROMPT_TOO_LONG,
            f"the prompt has {prompt_tokens} tokens; with one to generate it must fit {config.context_length}",
        )
    defaults = config.defaults
    wanted = params.max_tokens or defaults.max_tokens or max_new_tokens
    return contract.Sampling(
        max_tokens=min(wanted, left),
        min_tokens=params.min_tokens,
        temperature=_first(params.temperature, defaults.temperature),
        top_p=_first(params.top_p, defaults.top_p),
        top_k=_first(params.top_k, defaults.top_k),
        min_p=_first(params.min_p, defaults.min_p),
        seed=_first(params.seed, secrets.randbits(32)),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        repetition_penalty=_first(params.repetition_penalty, defaults.repetition_penalty),
        repetition_last_n=_first(params.repetition_last_n, contract.REPETITION_LAST_N),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        logprobs=params.logprobs,
    )


def _first(value: NumberT | None, default: NumberT) -> NumberT:
    return default if value is None else value
