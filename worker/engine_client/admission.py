"""Decides which requests an engine can serve, and how many at once."""

from collections.abc import Sequence

from tokenbus.protocol.wire import errors
from tokenbus.worker.contract import contract, engine_request


class CapacityLimit:
    """Limits how many requests are held, and estimates when the next one will fit."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        """Requests that may be held beyond the running ones."""
        self._duration_s = 1.0

    def __repr__(self) -> str:
        return f"<CapacityLimit of {self.max_waiting} that wait, {self._duration_s:.2f} s each>"

    def request_ended(self, duration_s: float) -> None:
        """Notes that a request ran to its end in `duration_s`."""
        # a moving average over about the last five requests
        self._duration_s += 0.2 * (duration_s - self._duration_s)

    def check(self, held: int, max_num_seqs: int) -> None:
        """Raises RequestError(overloaded) if `held` requests leave no room for another.

        Its `retry_after_ms` is the recent duration of a request, shared among the `max_num_seqs` that end meanwhile."""
        if held >= max_num_seqs + self.max_waiting:
            retry_after_ms = round(1e3 * self._duration_s * (1 + held - self.max_waiting) / max_num_seqs, 1)
            raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=retry_after_ms))


def check(request: engine_request.EngineRequest, config: contract.EngineConfig) -> None:
    """Raises RequestError for a request that this engine can't serve."""
    if "generate" not in config.features:
        raise errors.request_error(errors.Code.UNSUPPORTED, "this model generates nothing", param="model")
    _check_vocabulary("token_ids", request.token_ids, config)
    if request.resumed is not None:
        _check_vocabulary("resume_from.token_ids", request.resumed.token_ids, config)
    for token_id, _ in request.sampling.logit_bias:
        if token_id >= config.vocab_size:
            raise errors.request_error(
                errors.Code.INVALID_REQUEST,
                f"logit_bias: {token_id} is not a token id: the vocabulary has {config.vocab_size} tokens",
                param="logit_bias",
            )
    if len(request.token_ids) + request.sampling.max_tokens > config.context_length:
        raise errors.prompt_too_long(len(request.token_ids), config.context_length)


def _check_vocabulary(name: str, token_ids: Sequence[int], config: contract.EngineConfig) -> None:
    # one C call: a prompt may have 100,000 tokens
    outside = max(token_ids)
    if outside >= config.vocab_size:
        where = f"{name}[{token_ids.index(outside)}]"
        problem = f"{where} is {outside}, the vocabulary has {config.vocab_size} tokens"
        raise errors.request_error(errors.Code.INVALID_REQUEST, problem, param=where)
