"""The requests of a benchmark: random tokens, one text, or a trace, the same for the same seed."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tokenbus.protocol.wire import codec, messages
from tokenbus.replay.traces import TracedRequest

MIN_VOCABULARY = 16


class TimedRequest(NamedTuple):
    """A request and its due time in seconds from the start."""

    at_s: float
    request: messages.GenerateRequest


class Workload(Protocol):
    """Generates requests."""

    @property
    def num_requests(self) -> int | None:
        """The number of requests; None without a limit."""
        ...

    def fit(self, context_length: int, *, clip: bool) -> "FittedWorkload":
        """Returns the requests that fit the model's context, clipping long ones if `clip`. Raises ValueError if none
        fit."""
        ...

    def generate(self, common: messages.GenerateRequest, seed: str) -> Iterator[TimedRequest]:
        """Yields requests that extend `common`, the fields they all share."""
        ...

    def describe(self) -> str: ...


class FittedWorkload(NamedTuple):
    """A workload that fits the model, and the number of requests that did not."""

    workload: Workload
    skipped: int = 0
    clipped: int = 0


class RandomTokens(NamedTuple):
    """Unrelated prompts of one length, and answers of one length."""

    input_tokens: int
    output_tokens: int
    vocabulary: int

    @property
    def num_requests(self) -> int | None:
        return None

    def fit(self, context_length: int, *, clip: bool) -> FittedWorkload:
        if self.input_tokens + self.output_tokens > context_length:
            raise ValueError(
                f"--input-tokens {self.input_tokens} and --output-tokens {self.output_tokens} do not fit "
                f"the model's context of {context_length} tokens"
            )
        return FittedWorkload(self)

    def generate(self, common: messages.GenerateRequest, seed: str) -> Iterator[TimedRequest]:
        rng = np.random.default_rng(list(seed.encode()))
        while True:
            token_ids = rng.integers(1, self.vocabulary, self.input_tokens).tolist()
            request = codec.replace(common, token_ids=token_ids, max_tokens=self.output_tokens, ignore_eos=True)
            yield TimedRequest(0.0, request)

    def describe(self) -> str:
        return f"{self.input_tokens} random tokens, {self.output_tokens} back"


class RepeatedText(NamedTuple):
    """The same message repeatedly, through the model's chat template. The model decides where its answer ends."""

    text: str
    max_tokens: int | None

    @property
    def num_requests(self) -> int | None:
        return None

    def fit(self, context_length: int, *, clip: bool) -> FittedWorkload:
        return FittedWorkload(self)

    def generate(self, common: messages.GenerateRequest, seed: str) -> Iterator[TimedRequest]:
        turn = messages.ChatMessage(role="user", content=self.text)
        return itertools.repeat(TimedRequest(0.0, codec.replace(common, messages=[turn], max_tokens=self.max_tokens)))

    def describe(self) -> str:
        return f"the same text of {len(self.text)} characters"


class TraceWorkload(NamedTuple):
    """The requests of a trace in order. Prompts that share a prefix in the trace share one here."""

    name: str
    requests: Sequence[TracedRequest]
    vocabulary: int

    @property
    def num_requests(self) -> int | None:
        return len(self.requests)

    def fit(self, context_length: int, *, clip: bool) -> FittedWorkload:
        fits = [one.prompt_tokens + one.output_tokens <= context_length for one in self.requests]
        num_long = fits.count(False)
        if clip:
            kept = [one if fit else clipped(one, context_length) for one, fit in zip(self.requests, fits, strict=True)]
            return FittedWorkload(self._replace(requests=kept), clipped=num_long)
        if num_long == len(fits):
            raise ValueError(
                f"none of the {num_long} requests of {self.name} fits the model's context of {context_length} tokens: "
                f"--clip cuts them"
            )
        return FittedWorkload(self._replace(requests=list(itertools.compress(self.requests, fits))), skipped=num_long)

    def generate(self, common: messages.GenerateRequest, seed: str) -> Iterator[TimedRequest]:
        began_at = self.requests[0].at_s
        for one in self.requests:
            request = codec.replace(
                common,
                token_ids=one.token_ids(self.vocabulary).tolist(),
                max_tokens=one.output_tokens,
                ignore_eos=True,
                priority=one.priority or None,
            )
            yield TimedRequest(one.at_s - began_at, request)

    def describe(self) -> str:
        return f"{len(self.requests)} requests of {self.name}"


def clipped(one: TracedRequest, context_length: int) -> TracedRequest:
    """Clips a prompt, and an answer that would take more than half of the context."""
    output_tokens = min(one.output_tokens, context_length // 2)
    prompt_tokens = min(one.prompt_tokens, context_length - output_tokens)
    blocks = -(-prompt_tokens // one.block_tokens)
    return one._replace(prompt_tokens=prompt_tokens, output_tokens=output_tokens, hash_ids=one.hash_ids[:blocks])
