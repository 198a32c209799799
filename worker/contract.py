"""The engine contract: what a frontend may expect of anything that generates tokens.

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
8. After the last terminal nothing is held: `load()` shows zero running and waiting requests and used blocks. What is
   cached can be used by later requests of the same tenant and salt: `usage.cached_tokens` are those prompt tokens that
   were not computed, no answer depends on them, and a request with `cache_prompt` false neither finds nor leaves any.
9. `drain` returns when nothing runs any more. `cleanup` ends what is left in `error`, may be called at any time,
   also twice and before or after a failed `start`, and never raises.
10. When the engine dies, `died` says why, and no open sink is called: another engine may go on with its streams where
    they were (`EngineClient.take_over`), as long as `cleanup` has not ended them.
11. An engine with an `embedding_width` gives `embed` one row for each input, in their order, whatever runs beside it.
    An input's row does not depend on the others. One without makes none, and says so.

Sinks are called from the event loop, in order. A sink is a plain function and not an async iterator, because waking a
task for each token and stream costs several times what the token itself does (docs/decisions/0003).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tokenbus.protocol.wire import errors, internal, messages

REPETITION_LAST_N = 64
"""The wire's default for the tokens that penalties look at."""


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
    repetition_penalty: float = 1.0
    """Divides the logits of recent tokens that are positive and multiplies the others; 1 is off."""
    repetition_last_n: int = REPETITION_LAST_N
    """Recent tokens, of prompt and completion, that the penalties look at."""
    presence_penalty: float = 0.0
    """Taken from the logit of every recent token."""
    frequency_penalty: float = 0.0
    """Taken from the logit of every recent token, as often as it occurs."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each sampled one; None reports nothing."""

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on those before it."""
        return self.repetition_last_n > 0 and (
            self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        )


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """How likely a sampled token was, and the likeliest ones in its place: natural logarithms, before any sampling."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files recommend; the wire's defaults where they say nothing."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 40
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation as an engine sees it."""

    key: str
    token_ids: list[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    tenant: str = ""
    """In subject-token form. Tenants share no cache."""
    cache_salt: str = ""
    """Requests of one tenant share cache only where this is the same."""
    cache_prompt: bool = True
    """False: neither uses what is cached nor leaves anything."""
    priority: int = 0
    """Lower is sooner."""
    return_progress: bool = False
    """Hand out how far the prompt is computed."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a generation; the one with a `finish_reason` is the terminal."""

    token_ids: list[int]
    text: str
    finish_reason: messages.FinishReason | None = None
    stop_match: str | int | None = None
    error: errors.Error | None = None
    usage: messages.Usage | None = None
    timings: messages.Timings | None = None
    logprobs: list[Logprob] = []
    """One for each of `token_ids`, where the request asked for them."""
    progress: messages.Progress | None = None
    """How far the prompt is computed; such an output has no tokens."""


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
    """Blocks of the device's KV memory."""
    host_kv_blocks: int = 0
    """Blocks of which a copy in host memory can be kept beside."""
    prefix_cache: bool
    vocab_size: int
    features: tuple[str, ...]
    defaults: SamplingDefaults
    versions: dict[str, str]
    pid: int
    files: dict[str, str] = {}
    """Where the model was found."""
    kv_bytes: int = 0
    """Of the device's memory, for the keys and values of all sequences; 0 where it is not known."""
    embedding_width: int = 0
    """Numbers of one embedding; 0 where the engine makes none."""


class EngineStartError(RuntimeError):
    """The engine can't start with these settings or this model; starting again won't help. Says what to do."""


class Engine(Protocol):
    """Generates tokens; the guarantees are this module's docstring."""

    on_kv_events: Callable[[list[int], list[tuple[int, int]]], None]
    """Told which cached blocks are gone, and which are new, parents first, with the hash of the block before each;
    called before the outputs of the step in which it happened. It does nothing until somebody sets another."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes of each token's text, by token id; nothing before `start`."""
        ...

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

    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        """The embeddings of all inputs. Raises RequestError."""
        ...

    def clear_cache(self) -> None:
        """Forgets every cached block that no request uses."""
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
