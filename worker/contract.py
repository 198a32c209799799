"""The engine contract: what a front may expect of anything that generates tokens.

An engine that passes `tests/contracts` can be served. The rules, each of them tested there:

1. `start` may be called once; until it returns nothing else may be called but `cleanup`.
2. Every accepted `generate` hands its sink any number of outputs and then exactly one terminal (an output with a
   `finish_reason`), after which that sink is never called again. A refused one raises and never calls its sink.
3. `length` means that `max_tokens` were sampled; `stop` that a stop token or stop string ended it, named by
   `stop_match`. Every sampled token is in exactly one output. `usage` adds up.
4. No output's text splits a character, holds a stop string, or what could still become one.
5. `abort` ends a request with `cancelled` at once, and its lane and memory are free within a step. Aborting what is
   unknown or has ended does nothing.
6. Equal requests with equal seeds, run alone, give equal outputs; requests that run together do not touch each other.
7. As many requests and tokens as `EngineConfig` advertises can be held at the same time.
8. After the last terminal nothing is held: `load()` shows zero running and waiting requests and used blocks.
9. `drain` returns when nothing runs any more. `cleanup` ends what is left in `error`, may be called at any time,
   also twice and before or after a failed `start`, and never raises.
10. When the engine dies, every open sink gets one terminal with `error` `worker_lost`, and `died` is told why.

Sinks are called from the event loop, in order. A sink is a plain function and not an async iterator, because waking a
task for each token and stream costs several times what the token itself does (docs/decisions/0003).
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from protocol import errors, internal, messages


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to end, with every default filled in."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """The request's own, beside the model's."""
    ignore_eos: bool = False
    """The model's end tokens are never sampled; only the request's own stops and `max_tokens` end it."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files recommend; the wire's defaults where they say nothing."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 40
    min_p: float = 0.0
    max_tokens: int | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation as an engine sees it."""

    key: str
    token_ids: list[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a generation; the one with a `finish_reason` is the terminal."""

    token_ids: list[int]
    text: str
    finish_reason: messages.FinishReason | None = None
    stop_match: str | int | None = None
    error: errors.Error | None = None
    usage: messages.Usage | None = None
    timings: messages.Timings | None = None


Sink = Callable[[Output], None]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself once it has started."""

    engine: str
    engine_version: str
    source: str
    fingerprint: str
    """Equal for engines whose KV and tokens mean the same."""
    context_length: int
    """Tokens of one sequence, prompt and completion together."""
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_block_size: int
    total_kv_blocks: int
    prefix_cache: bool
    vocab_size: int
    features: tuple[str, ...]
    defaults: SamplingDefaults
    versions: dict[str, str]
    pid: int


class EngineStartError(RuntimeError):
    """The engine can't start with these settings or this model; starting again won't help. Says what to do."""


class Engine(Protocol):
    """Generates tokens; the guarantees are this module's docstring."""

    async def start(self, worker_id: str) -> EngineConfig:
        """Loads the model. Raises EngineStartError when it can't be loaded."""
        ...

    def generate(self, request: EngineRequest, sink: Sink) -> None:
        """Accepts a request and returns at once. Raises RequestError, and does nothing, if it can't be accepted."""
        ...

    def abort(self, key: str) -> None:
        """Ends a request with `cancelled`."""
        ...

    async def tokenize(self, request: internal.Tokenize) -> list[int]:
        """The token ids of a text or conversation. Raises RequestError."""
        ...

    def tokenizer_bundle(self) -> bytes | None:
        """The packed `TokenizerBundle`, where the engine can offer one that agrees with its own tokenizer."""
        ...

    def load(self) -> messages.Load:
        """How busy the engine is now."""
        ...

    async def died(self) -> str:
        """Returns, with the reason, when the engine can't go on."""
        ...

    async def drain(self) -> None:
        """Returns when every accepted request has ended. Cancel it to stop waiting."""
        ...

    async def cleanup(self) -> None:
        """Ends everything and gives back what the engine holds."""
        ...
