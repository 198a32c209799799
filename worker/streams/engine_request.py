"""Makes the engine's request of a run, and fills in what the client left open from the model's defaults; pure but for
the seed, which is random if the client gave none."""

import secrets
from typing import TypeVar

from tokenbus.protocol.wire import block_hash, errors, internal, subjects, validation
from tokenbus.worker import contract

NumberT = TypeVar("NumberT", int, float)


def to_engine_request(run: internal.Run, config: contract.EngineConfig, max_new_tokens: int) -> contract.EngineRequest:
    """Raises RequestError if the prompt is malformed, or this engine can't serve it."""
    try:
        token_ids = block_hash.unpack_token_ids(run.token_ids)
    except ValueError as error:
        raise errors.request_error(errors.Code.INVALID_REQUEST, str(error), param="token_ids") from error
    if not token_ids:
        raise errors.request_error(errors.Code.INVALID_REQUEST, "the prompt has no tokens", param="token_ids")
    params = run.params
    for need in validation.required_run_features(params):
        if need.feature not in config.features:
            problem = f"{need.param} is not served by this engine"
            raise errors.request_error(errors.Code.UNSUPPORTED, problem, param=need.param)
    return contract.EngineRequest(
        key=run.request_id,
        token_ids=token_ids,
        sampling=resolve_sampling(params, len(token_ids), config, max_new_tokens),
        stop=tuple(params.stop),
        tenant=subjects.key_to_tenant(run.request_id),
        cache_salt=params.cache_salt,
        cache_prompt=params.cache_prompt,
        priority=params.priority,
        return_progress=params.return_progress and params.stream,
    )


def resolve_sampling(
    params: internal.GenerationParams, prompt_tokens: int, config: contract.EngineConfig, max_new_tokens: int
) -> contract.Sampling:
    """Fills in what the client left open. Raises RequestError(prompt_too_long) if the context has no room for a token.

    A completion ends at the end of the context in any case. Without `max_tokens` it also ends at the model's own limit
    or, if it has none, at `max_new_tokens`, a setting."""
    left = config.context_length - prompt_tokens
    if left < 1:
        raise errors.request_error(
            errors.Code.PROMPT_TOO_LONG,
            f"the prompt has {prompt_tokens} tokens; with one to generate it must fit {config.context_length}",
        )
    defaults = config.defaults
    # 0 is refused earlier, so `or` means: not given
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
