"""Chooses the next token of one lane: greedy by what numpy found, anything else by llama.cpp's sampler chain."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import numpy as np
from llama_cpp import llama_cpp as llama

from worker import contract

Row = np.ndarray[tuple[int], np.dtype[np.float32]]


class LaneSampler:
    """The sampler of one sequence, with its random state. The chain: top_k, top_p, min_p, temperature, dist."""

    def __init__(self, sampling: contract.Sampling, end_token_ids: frozenset[int]) -> None:
        self._never = sorted(end_token_ids) if sampling.ignore_eos else []
        self._not_yet = sorted({*sampling.stop_token_ids, *end_token_ids})
        self._chain = _chain(sampling) if sampling.temperature > 0 else None

    def forbid(self, logits: Row, *, may_stop: bool) -> None:
        """Makes the tokens impossible that may not come next. Ids beyond the vocabulary are nobody's."""
        for token in self._never if may_stop else self._not_yet:
            if token < len(logits):
                logits[token] = -np.inf

    def choose(self, context: llama.llama_context_p, place: int, greedy: int) -> int:
        """The next token, from the logits at `place` of the batch; `greedy` is the likeliest."""
        if self._chain is None:
            return greedy
        token: int = llama.llama_sampler_sample(self._chain, context, place)
        return token

    def close(self) -> None:
        if self._chain is not None:
            llama.llama_sampler_free(self._chain)
            self._chain = None


def _chain(sampling: contract.Sampling) -> llama.llama_sampler_p:
    chain: llama.llama_sampler_p = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    if sampling.top_k > 0:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_min_p(sampling.min_p, 1))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(sampling.temperature))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(sampling.seed))
    return chain
