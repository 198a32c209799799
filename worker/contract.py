"""The engine contract: the promises on which a frontend relies, whatever generates the tokens.

An engine that passes `tests/contracts` can be served. Its rules, each of which is tested there:

1. `start` may be called once; until it returns, only `cleanup` may be called.
2. Every accepted `generate` hands its sink any number of outputs and then exactly one terminal (an output with a
   `finish_reason`), after which that sink is never called again. A refused one raises and never calls its sink.
3. `length` means that `max_tokens` were sampled; `stop` that a stop token or stop string ended it, named by
   `stop_match`. Every sampled token is in exactly one output. `usage` adds up.
4. No output's text splits a character, holds a stop string, or what could still become one.
5. `abort` ends a request with `cancelled` at once, and its lane and memory are free within a step. Aborting a request
   that is unknown or has ended does nothing.
6. Equal requests with equal seeds give equal outputs alone; those that run together do not affect each other.
7. An engine can hold as many requests and tokens at the same time as its `EngineConfig` advertises.
8. After the last terminal nothing is held: `load()` shows zero running and waiting requests and used blocks. Later
   requests of the same tenant and salt can use what is cached: `usage.cached_tokens` counts the prompt tokens that were
   not computed, no answer depends on them, and a request with `cache_prompt` false neither uses nor leaves any.
9. `drain` returns when nothing runs any more. `cleanup` ends what is left with `error`; it may be called at any time,
   also twice and before or after a failed `start`, and never raises.
10. When the engine dies, `died` says why, and no open sink is called: another engine may go on with its streams where
    they were (`EngineClient.take_over`), as long as `cleanup` has not ended them.
11. An engine with an `embedding_width` returns one row for each input of `embed`, in their order, whatever runs beside
    it. An input's row does not depend on the others. An engine without one refuses.
12. A request with `resumed` continues a completion. Before `generate` returns, its tokens come out as one output with
    `resumed_texts`. Then all goes on as if they had been sampled here: held back text, stop strings, draws, penalties,
    `min_tokens`, `usage`. If they complete it, the terminal follows without another token, after `generate` has
    returned. If it ends before the last of them, it is refused. A sink that raises meanwhile refuses it as well.
13. An engine with the feature `structured_output` or `grammar` keeps to a request's `constraint`: its output is what
    the constraint accepts, up to an end token, or a beginning of that if it ends otherwise. This is so wherever it is
    resumed, and when another engine goes on with it. Once the constraint is compiled, an output without tokens says so
    (`is_constraint_ready`). One that can't be compiled ends with `invalid_request`, which names its `param`, and with
    no output before. Where only an end token may follow, `min_tokens` gives way.
14. An engine with the feature `rerank` returns one score for each document of `rerank`, in their order, whatever runs
    beside it. A document's score does not depend on the others. An engine without the feature refuses.
15. An engine with the feature `lora` loads LoRA adapters while streams go on. A request is computed with its `adapters`
    and no others, whatever runs beside it, and shares cached blocks only with requests that have the same. An adapter
    that is unloaded while requests use it stays until the last of them has ended. A file that is no adapter of the
    model is refused, and nothing has changed. An engine without the feature refuses every file.

Sinks are called from the event loop, in order. A sink is a plain function and not an async iterator, because waking a
task for each token and stream costs several times what the token itself does (docs/decisions/0003).
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from tokenbus.protocol.wire import errors, internal, messages
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.worker.chat_format.chat_format import ChatFormat


class Sampling(SamplingParams, frozen=True, kw_only=True):
    """The sampling parameters of a request, with every default filled in."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    repetition_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # type: ignore[assignment]  # a tuple can't be changed by mistake
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on the tokens before it."""
        return self.repetition_last_n > 0 and (
            self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        )


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural log probability of a sampled token, and those of the likeliest ones, before any sampling."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class ResumedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a completion, which another worker has sampled."""

    token_ids: list[int]
    """At least one."""
    logprobs: list[Logprob] = []
    """Those of the last tokens; they are unknown for tokens that come from a client."""
    cached_tokens: int = 0
    """Prompt tokens that the first worker had cached."""
    queue_ms: float = 0.0
    """Time from the first accept to the first step."""
    prefill_ms: float = 0.0
    """Time from the first step to the first token."""
    elapsed_ms: float = 0.0
    """Time since the first accept."""


class OutputParsing(msgspec.Struct, frozen=True, kw_only=True):
    """Asks that reasoning and tool calls are told apart from the text, in the model's own chat format."""

    tools: dict[str, dict[str, Any]] | None = None
    """The JSON schema of each tool's parameters, by name; None: calls stay text."""
    generation_prompt: str | None = None
    """The end of the prompt that belongs to the answer, such as `<think>`; None: what the chat format says of every
    answer."""
    hold_calls: bool = False
    """Whether a call is handed out only once it is complete, so that one that is cut off is dropped."""


class ConstraintKind(enum.StrEnum):
    """The languages in which a constraint can be written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of strings."""
    GBNF = "gbnf"
    LARK = "lark"
    """llguidance's dialect, with `<[123]>` for a token id and `%json {...}` for a nested schema."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that says what an output may be."""

    kind: ConstraintKind
    source: str
    param: str
    """The field of the request that errors name."""
    rule_params: dict[str, str] = {}
    """The fields, where they are others, that single rules of the source are made of."""
    preamble: str = ""
    """A grammar in llguidance's Lark of what comes before, such as the model's reasoning, and of `@body`, which stands
    for the constraint itself; empty if nothing does."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one generation, checked and complete."""

    key: str
    token_ids: list[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    tenant: str = ""
    """The tenant in the form of a subject token. Tenants share no cache."""
    cache_salt: str = ""
    """Requests of one tenant share cache only if this is the same."""
    cache_prompt: bool = True
    """Whether it may use what is cached and leave something."""
    priority: int = 0
    """Lower is sooner."""
    adapters: tuple[Adapter, ...] = ()
    """The adapters to use, by digest and each at most once. They are loaded, and sorted."""
    return_progress: bool = False
    """Whether to report how far the prompt is computed."""
    resumed: ResumedCompletion | None = None
    """The tokens that the completion begins with, if it continues one."""
    parsing: OutputParsing | None = None
    """The way in which the answer is parsed; None: all of it is text."""
    constraint: Constraint | None = None
    """The grammar of the output, which may be any text if this is None."""
    is_held: bool = False
    """Whether it is computed only after `release`. An engine that takes over a dead one's requests holds none back."""


class CachedPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A run of tokens whose blocks may be cached, in the cache that requests of one tenant, salt and adapters share."""

    tenant: str
    """In the form of a subject token."""
    cache_salt: str
    adapters: tuple[Adapter, ...]
    """Sorted; they need not be loaded."""
    token_ids: bytes
    """Unsigned 32-bit little-endian integers."""


class KvBlockFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a saved KV block: whatever in it is not the numbers of keys and values, which can be any."""

    num_bytes: int
    """The size of a block."""
    fixed: tuple[tuple[int, bytes], ...] = ()
    """Bytes that are the same in every block, each with its offset."""
    positions: tuple[int, ...] = ()
    """The offsets of the tokens' positions: 32-bit little-endian integers, one for each token, in any order."""


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Says how a generation came to its first token."""

    cached_tokens: int
    """Prompt tokens that were cached."""
    queue_ms: float
    """Time from the accept to the first step."""
    prefill_ms: float
    """Time from the first step to the first token."""


class ToolCallPart(NamedTuple):
    """More of a tool call."""

    call: int
    """The number of the call among those of the answer."""
    arguments: str = ""
    """More of its arguments."""
    id: str = ""
    """The call's id, in its first part."""
    name: str = ""
    """The function's name, in its first part."""


class AnswerParts(NamedTuple):
    """Parts of an answer that are not its text."""

    reasoning: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a generation; the one with a `finish_reason` is the terminal."""

    token_ids: list[int]
    text: str
    reasoning: str = ""
    """More of the reasoning, which is no part of the text."""
    tool_calls: tuple[ToolCallPart, ...] = ()
    """New tool calls, and more of the last one: at most one part of each call."""
    finish_reason: messages.FinishReason | None = None
    stop_match: str | int | None = None
    error: errors.Error | None = None
    usage: messages.Usage | None = None
    timings: messages.Timings | None = None
    logprobs: list[Logprob] = []
    """One for each of `token_ids`, if the request asked for them; of resumed tokens, those of the last ones."""
    progress: messages.Progress | None = None
    """The progress of the prompt; such an output has no tokens."""
    is_constraint_ready: bool = False
    """Whether it says that the request's constraint is compiled; such an output has no tokens."""
    first_token: FirstToken | None = None
    """With the first token that this engine sampled, unless it continues a completion."""
    resumed_texts: list[str] | None = None
    """The text of each token, if they are those of `EngineRequest.resumed`, which the client has already."""
    resumed_parts: dict[int, AnswerParts] = {}
    """The reasoning and tool calls that came with resumed tokens, by the token's place among them."""

    @property
    def is_resumed(self) -> bool:
        """Whether it has the tokens with which a completion begins, and not new ones."""
        return self.resumed_texts is not None


Sink = Callable[[Output], None]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a started engine."""

    engine: str
    engine_version: str
    source: str
    fingerprint: str
    """Equal for engines whose KV and token ids mean the same."""
    context_length: int
    """The most tokens of one sequence, prompt and completion together."""
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_block_size: int
    total_kv_blocks: int
    """The blocks of the device's KV memory."""
    host_kv_blocks: int = 0
    """The number of blocks of which host memory can hold a copy besides."""
    writes_through: bool = False
    """Whether blocks are copied to host memory as soon as they are complete."""
    idle_blocks_cost: bool = True
    """Whether blocks that no sequence uses slow the steps of others down while they are on the device."""
    prefix_cache: bool
    vocab_size: int
    features: tuple[str, ...]
    defaults: SamplingParams
    """Sampling parameters that the model's files recommend."""
    versions: dict[str, str]
    pid: int
    files: dict[str, str] = {}
    """The files in which the model was found."""
    kv_bytes: int = 0
    """The device memory for the keys and values of all sequences; 0 where it is not known."""
    embedding_width: int = 0
    """The numbers of one embedding; 0 if the engine makes none."""
    end_token_ids: tuple[int, ...] = ()
    """The model's own end tokens."""
    chat_format: ChatFormat | None = None
    """The way the model writes reasoning and tool calls; None where that is not known."""
    kv_identity: str = ""
    """Equal for engines that can read each other's KV blocks; empty if this one exchanges none."""
    kv_format: KvBlockFormat | None = None
    """The form of its blocks, if it exchanges any."""


class EngineStartError(RuntimeError):
    """The engine can't start with these settings or this model, and trying again won't help; says what to do."""


class Engine(Protocol):
    """Generates tokens; the guarantees are this module's docstring."""

    on_kv_events: Callable[[list[int], list[tuple[int, int]]], None]
    """Called with the hashes of cached blocks that are gone, and of the new ones, parents first, each behind that of
    the block before it; the outputs of that step come later. By default it does nothing."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes of each token's text, by token id; empty before `start`."""
        ...

    async def start(self, worker_id: str) -> EngineConfig:
        """Loads the model. Raises EngineStartError when it can't be loaded."""
        ...

    def generate(self, request: EngineRequest, sink: Sink) -> None:
        """Accepts a request and returns at once. Raises RequestError, and does nothing, if it can't accept it."""
        ...

    def abort(self, key: str) -> None:
        """Ends a request with `cancelled`."""
        ...

    def release(self, key: str) -> None:
        """Has a request computed that was held back; does nothing for any other."""
        ...

    async def export_blocks(self, prefix: CachedPrefix, first: int, max_blocks: int) -> tuple[int, list[bytes]]:
        """Returns how many blocks of a prefix are cached, from its beginning on without a gap, and the contents of up
        to `max_blocks` of them from block `first` on. Raises RequestError."""
        ...

    def put_blocks(self, prefix: CachedPrefix, first: int, blocks: list[bytes]) -> None:
        """Caches blocks of another engine with the same identity, from block `first` of a prefix on, for requests that
        follow. Blocks behind one that is not cached, and those for which there is no room, are dropped."""
        ...

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The speed at which it has lately computed prompts; None if it has not computed any."""
        ...

    async def tokenize(self, request: internal.Tokenize) -> list[int]:
        """Returns the token ids of a text or conversation. Raises RequestError."""
        ...

    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        """Returns the embeddings of all inputs. Raises RequestError.

        If the caller is cancelled, the inputs that are not yet computed never are. The same holds for `rerank`."""
        ...

    async def rerank(self, request: internal.Rerank) -> internal.RerankResult:
        """Returns the scores of all documents. Raises RequestError."""
        ...

    async def load_adapter(self, path: str) -> str:
        """Loads a LoRA adapter for requests from now on; returns the digest by which they name it. A file may be loaded
        several times. Raises RequestError if the file can't be used."""
        ...

    def unload_adapter(self, digest: str) -> None:
        """Reverses one `load_adapter`. Requests that use the adapter keep it."""
        ...

    def clear_cache(self) -> None:
        """Drops every cached block that no request uses."""
        ...

    def tokenizer_bundle(self) -> bytes | None:
        """The packed `TokenizerBundle`; None if the engine has none that agrees with its own tokenizer."""
        ...

    def load(self) -> messages.Load:
        """The engine's load now."""
        ...

    async def died(self) -> str:
        """Returns the reason when the engine can't go on."""
        ...

    async def drain(self) -> None:
        """Returns when every accepted request has ended; it can be cancelled."""
        ...

    async def cleanup(self) -> None:
        """Ends all requests and frees what the engine holds."""
        ...
