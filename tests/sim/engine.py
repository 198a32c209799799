"""An engine whose tokens tell where they belong: the request's seed and the token's place determine its id.

At about one place in seven, a near tie of two tokens, the id also depends on the generation, as it depends on the shape
of the batch in real engines. So a test notices if tokens were sampled a second time that a client already had."""

import asyncio
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from tokenbus.protocol.wire import errors, internal, messages
from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.worker.contract import contract, engine_output, engine_request

_CONTEXT_LENGTH = 4_096
_VALUES = 1_000
"""Tokens that can be sampled at each place."""
_TOKEN = re.compile(r"<(\d+):(\d+)>")


class Token(NamedTuple):
    """A token of a completion: its place there, and the value that was sampled."""

    place: int
    value: int

    @property
    def token_id(self) -> int:
        return self.place * _VALUES + self.value

    @property
    def text(self) -> str:
        return f"<{self.value}:{self.place}>"

    @classmethod
    def of(cls, token_id: int) -> "Token":
        return cls(*divmod(token_id, _VALUES))


def sample(seed: int, place: int, serial: int) -> Token:
    """Samples a token for the generation with this serial number."""
    drawn = _hash(f"{seed}:{place}")
    if is_near_tie(seed, place):
        drawn = _hash(f"{seed}:{place}:{serial}")
    return Token(place, drawn % _VALUES)


def is_near_tie(seed: int, place: int) -> bool:
    """Whether two generations may sample different tokens here."""
    return _hash(f"{seed}:{place}") % 7 == 0


def tokens_in(text: str) -> list[Token]:
    """Returns the tokens of a text, which consists of nothing else."""
    tokens = [Token(int(place), int(value)) for value, place in _TOKEN.findall(text)]
    assert "".join(token.text for token in tokens) == text, text
    return tokens


@functools.lru_cache(4_096)
def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def first_token(token: Token) -> engine_output.FirstTokenStats:
    """Returns the account of a generation's first token, with different numbers for different tokens."""
    return engine_output.FirstTokenStats(
        cached_tokens=token.value % 4, queue_ms=float(token.value % 5), prefill_ms=float(token.value % 7)
    )


def check_completion(tokens: Sequence[Token], seed: int | None) -> None:
    """Asserts that tokens are the beginning of one completion; if `seed` is known, of its completion, up to near
    ties."""
    assert [token.place for token in tokens] == list(range(len(tokens))), tokens
    if seed is not None:
        for token in tokens:
            assert is_near_tie(seed, token.place) or token == sample(seed, token.place, 0), (seed, tokens)


class _Generation:
    """One accepted request."""

    _serials = itertools.count(1)

    def __init__(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> None:
        self.request = request
        self.sink = sink
        self._serial = next(self._serials)
        self._resumed = request.resumed
        self._first: engine_output.FirstTokenStats | None = self._resumed
        self.num_tokens = 0

    @property
    def num_missing(self) -> int:
        """The number of tokens that it has yet to sample."""
        return self.request.sampling.max_tokens - self.num_tokens

    def replay(self) -> None:
        """Hands out the tokens with which the completion begins."""
        if self._resumed is None:
            return
        tokens = [Token.of(token_id) for token_id in self._resumed.token_ids]
        check_completion(tokens, None)
        self.num_tokens = len(tokens)
        texts = [token.text for token in tokens]
        self.sink(
            engine_output.Output(token_ids=list(self._resumed.token_ids), text="".join(texts), resumed_texts=texts)
        )

    def step(self) -> None:
        """Samples a token, which may be the last one."""
        token = sample(self.request.sampling.seed, self.num_tokens, self._serial)
        self.num_tokens += 1
        is_first = self._first is None
        self._first = self._first or first_token(token)
        if self.num_missing == 0:
            self.finish(messages.FinishReason.LENGTH, token=token, is_first=is_first)
        else:
            first = self._first if is_first else None
            self.sink(engine_output.Output(token_ids=[token.token_id], text=token.text, first_token=first))

    def finish(
        self,
        reason: messages.FinishReason,
        error: errors.Error | None = None,
        token: Token | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        """Hands out the terminal."""
        first = self._first or engine_output.FirstTokenStats(cached_tokens=0, queue_ms=0.0, prefill_ms=0.0)
        prompt, completion = len(self.request.token_ids), self.num_tokens
        ttft_ms = first.queue_ms + first.prefill_ms
        self.sink(
            engine_output.Output(
                token_ids=[] if token is None else [token.token_id],
                text="" if token is None else token.text,
                first_token=first if is_first else None,
                finish_reason=reason,
                error=error,
                usage=messages.Usage(
                    prompt_tokens=prompt,
                    completion_tokens=completion,
                    total_tokens=prompt + completion,
                    cached_tokens=first.cached_tokens,
                ),
                timings=messages.Timings(
                    queue_ms=first.queue_ms,
                    prefill_ms=first.prefill_ms,
                    ttft_ms=ttft_ms,
                    decode_ms=0.0,
                    total_ms=ttft_ms,
                ),
            )
        )


class TimedEngine:
    """Takes a step every `token_s` while it has requests; each step gives each request one token."""

    def __init__(self, max_num_seqs: int, token_s: float) -> None:
        self.config = contract.EngineConfig(
            engine="sim",
            engine_version="1",
            source="nothing",
            fingerprint="0",
            context_length=_CONTEXT_LENGTH,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            kv_block_size=16,
            total_kv_blocks=4_096,
            prefix_cache=False,
            vocab_size=_CONTEXT_LENGTH * _VALUES,
            features=("generate", "embed", "rerank", "prompt", "token_ids", "resume"),
            defaults=SamplingParams(),
            versions={},
            pid=0,
        )
        self.token_bytes: list[bytes] = []
        self.on_kv_events: Callable[[list[int], list[tuple[int, int]]], None] = lambda removed, stored: None
        self._token_s = token_s
        self._generations: dict[str, _Generation] = {}
        self._step_timer: asyncio.TimerHandle | None = None
        self.step_done: Callable[[], None] = lambda: None
        self.pooling_s = 0.0
        """Time that inputs take."""
        self.num_pooling = 0
        """Requests whose inputs it is computing."""

    @property
    def running(self) -> list[str]:
        """The keys of its requests."""
        return list(self._generations)

    async def start(self, worker_id: str) -> contract.EngineConfig:
        return self.config

    def generate(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> None:
        if len(self._generations) > self.config.max_num_seqs:  # one may wait, as routers expect
            raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=100.0))
        if request.resumed is not None and len(request.resumed.token_ids) > request.sampling.max_tokens:
            raise errors.request_error(errors.Code.INVALID_REQUEST, "the completion has ended before")
        generation = self._generations[request.key] = _Generation(request, sink)
        generation.replay()
        if generation.num_missing == 0:
            asyncio.get_running_loop().call_soon(self._end_complete, request.key, generation)
        elif self._step_timer is None:
            self._step_later()

    def abort(self, key: str) -> None:
        self._end(key, messages.FinishReason.CANCELLED)

    def die(self) -> None:
        for key in list(self._generations):
            self._end(key, messages.FinishReason.ERROR, errors.make_error(errors.Code.WORKER_LOST))

    async def tokenize(self, request: internal.Tokenize) -> list[int]:
        return [1, 2, 3]

    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        await self._pool()
        return internal.EmbedResult(vectors=bytes(8 * len(request.inputs)), prompt_tokens=1)

    async def rerank(self, request: internal.Rerank) -> internal.RerankResult:
        await self._pool()
        return internal.RerankResult(scores=bytes(4 * len(request.documents)), prompt_tokens=1)

    async def _pool(self) -> None:
        if self.pooling_s:
            self.num_pooling += 1
            try:
                await asyncio.sleep(self.pooling_s)
            finally:
                self.num_pooling -= 1

    def clear_cache(self) -> None:
        pass

    def tokenizer_bundle(self) -> bytes | None:
        return None

    def load(self) -> messages.Load:
        return messages.Load(running=len(self._generations))

    async def died(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def drain(self) -> None:
        while self._generations:
            await asyncio.sleep(0.05)

    async def cleanup(self) -> None:
        self.die()

    def _step_later(self) -> None:
        self._step_timer = asyncio.get_running_loop().call_later(self._token_s, self._step)

    def _step(self) -> None:
        self._step_timer = None
        for key, generation in list(self._generations.items()):
            if self._generations.get(key) is generation and generation.num_missing > 0:
                if generation.num_missing == 1:
                    del self._generations[key]  # before its sink is called, which may abort it
                generation.step()
        if self._generations:
            self._step_later()
        self.step_done()

    def _end_complete(self, key: str, generation: _Generation) -> None:
        """Ends a generation that has no token left to sample, unless it was aborted."""
        if self._generations.get(key) is generation:
            self._end(key, messages.FinishReason.LENGTH)
            self.step_done()

    def _end(self, key: str, reason: messages.FinishReason, error: errors.Error | None = None) -> None:
        generation = self._generations.pop(key, None)
        if generation is not None:
            generation.finish(reason, error)
