"""The engine contract: the promises on which a frontend relies, whatever generates the tokens.

An engine that passes `tests/contracts` can be served. Its rules, each of which is tested there:

1. `start` may be called once, and again after the engine has died; until it returns, only `cleanup` may be called.
2. Every accepted `generate` hands its sink any number of outputs and then exactly one terminal (an output with a
   `finish_reason`); that sink is never called again. A refused `generate` raises and never calls its sink.
3. `length` means that `max_tokens` were sampled; `stop` that a stop token or stop string ended it, named by
   `stop_match`. Every sampled token is in exactly one output. `usage` adds up.
4. No output's text splits a character, contains a stop string, or ends in what could become one.
5. `abort` ends a request with `cancelled` at once, and its lane and memory are free within a step. Aborting a request
   that is unknown or has ended does nothing.
6. Equal requests with equal seeds give equal outputs when run alone; concurrent requests do not affect each other.
7. An engine can hold as many requests and tokens at once as its `EngineConfig` advertises, unless it shares KV memory
   with others: then as many as `load()` says, and at least one.
8. After the last terminal nothing is held: `load()` shows zero running and waiting requests and used blocks. Later
   requests of the same tenant and salt can use what is cached: `usage.cached_tokens` counts the prompt tokens that were
   not computed, no answer depends on that, and a request with `cache_prompt` false neither uses nor leaves any.
9. `drain` returns when nothing is running. `cleanup` ends what is left with `error`; it may be called at any time, even
   twice, before `start` or after it failed, and never raises.
10. When the engine dies, `died` says why, and no open sink is called: after another `start`, its streams continue where
    they stopped, unless `cleanup` has ended them.
11. An engine with `embeddings` returns one row for each input of `embed`, in order, whatever else is running. An
    input's row does not depend on other inputs, and no stream depends on what is embedded. An engine without the
    feature refuses.
12. A request with `resumed` continues a completion. Before `generate` returns, its tokens come out as one output with
    `resumed_texts`. Everything then continues as if they had been sampled here: held-back text, stop strings, draws,
    penalties, `min_tokens`, `usage`. If they complete it, the terminal follows without another token, after `generate`
    has returned. If they would end it before the last of them, it is refused, as it is if the sink raises meanwhile.
13. An engine with the feature `structured_output` or `grammar` follows a request's `constraint`: its output up to an
    end token is accepted by the constraint, or is a prefix of such an output if it ends otherwise. This holds wherever
    it is resumed, and when another engine continues it. Once the constraint is compiled, an output without tokens says
    so (`is_constraint_ready`). If it can't be compiled, the request ends with `invalid_request`, which names its
    `param`, and without any other output. Where only an end token may follow, `min_tokens` gives way.
14. An engine with the feature `rerank` returns one score for each document of `rerank`, in order, whatever else is
    running. A document's score does not depend on the others. An engine without the feature refuses.
15. An engine with the feature `lora` loads LoRA adapters while streams run. A request is computed with its `adapters`
    and no others, whatever else is running, and shares cached blocks only with requests that have the same adapters. An
    adapter that is unloaded while requests use it stays until the last of them has ended. A file that is not an adapter
    for the model is refused, and nothing changes. An engine without the feature refuses every file.
16. An engine with the feature `reasoning_budget` closes reasoning that has reached its `reasoning_limit` with the chat
    format's marker, and the answer continues. Where it does so depends on the tokens alone: the answer is the same
    wherever the request is resumed, and when another engine continues it. An engine without the feature ignores the
    limit.
17. An engine with the feature `cache_control` keeps the prefix of a request with a `cache_ttl_s` longer than others,
    until that time is over or nothing else can be evicted. With `is_warm_up`, it computes the prompt: the output is a
    terminal with `length` and no token, and the prompt is cached as after any request.
18. An engine with the feature `prompt_logprobs` hands out the log probability of each token of the prompt from
    `prompt_logprobs_from` on, in order and once, before the first token and also when another engine continues the
    request. They are what the model would have given these tokens, had it sampled them, whatever is cached and whatever
    else is running.

Sinks are called from the event loop, in order. A sink is a plain function, not an async iterator, because waking a task
for each token and stream costs several times as much as the token itself (docs/decisions/0002).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from tokenbus.protocol.wire import internal, messages
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.contract.chat_format import ChatFormat

_REASONS_WITH_TOKENS = (messages.FinishReason.STOP, messages.FinishReason.LENGTH)


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of a plan, in bytes. With GPUs, host and GPUs together."""

    weight_bytes: int
    kv_bytes: int
    compute_bytes: int
    host_cache_bytes: int
    """Room for prefixes that no sequence uses."""
    reserve_bytes: int
    """The host memory that is left for others."""
    total_bytes: int
    """The host's total memory."""
    free_bytes: int
    """The part of it that was free, or already taken by the engine."""
    gpu_bytes: int = 0
    """The part of the above that is on GPUs."""
    gpu_layers: int = 0
    """The layers on GPUs; one more than the model has if the output layer is there too."""

    def parts(self) -> dict[str, int]:
        """Returns what the replica takes, by part."""
        return {
            "weights": self.weight_bytes,
            "kv": self.kv_bytes,
            "buffers": self.compute_bytes,
            "host_cache": self.host_cache_bytes,
        }

    @property
    def planned_bytes(self) -> int:
        """Everything that the replica takes, including the weights."""
        return sum(self.parts().values())


class RecoveredCopies(msgspec.Struct, frozen=True, array_like=True):
    """The copies of an earlier engine found in a region."""

    blocks: int = 0
    num_bytes: int = 0
    discarded: dict[str, int] = {}
    """The number of unusable non-empty slots, by reason."""


class CachedPrefix(msgspec.Struct, frozen=True, array_like=True):
    """A run of tokens whose blocks may be cached, in the cache shared by requests with the same tenant, salt and
    adapters."""

    tenant: str
    """The tenant as a subject token."""
    cache_salt: str
    adapters: tuple[Adapter, ...]
    """Sorted; they need not be loaded."""
    token_ids: bytes
    """Unsigned 32-bit little-endian integers."""


class KvBlockFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a saved KV block: everything in it except the keys and values, which can be any numbers."""

    num_bytes: int
    """The size of a block."""
    fixed: tuple[tuple[int, bytes], ...] = ()
    """Byte strings that are the same in every block, each with its offset."""
    positions: tuple[tuple[int, ...], ...] = ()
    """The offsets of each token's position, a 32-bit little-endian integer that may occur several times. The tokens may
    be in any order."""
    token_ids: tuple[int, ...] = ()
    """The offsets of the tokens' ids, also 32-bit integers, all below `vocab_size`."""
    vocab_size: int = 0


class EngineDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that an engine computes on."""

    name: str
    """The name of its memory: `host`, or the engine's name for it."""
    kind: str
    """`cpu` or `gpu`."""
    description: str = ""
    """The driver's description of it."""
    layers: int | None = None
    """The number of the model's layers that it computes, if known."""


class CheckpointSizes(NamedTuple):
    """The host memory that checkpoints may take, and the sizes of their copies."""

    budget_bytes: int
    state_bytes: int
    """The largest size of a copy of the partial state."""
    token_bytes: int
    """The size of a token's KV; 0 for a model without KV."""
    copy_bytes: int = 0
    """The size of a KV copy beyond that of its tokens."""
    slot_bytes: int = 0
    """Each copy takes slots of this size; 0: it takes its own size."""
    slot_data_bytes: int = 1
    """The bytes of a copy that fit in a slot."""
    slot_tokens: int = 1
    """The tokens of a copy that fit in a slot."""

    def kv_bytes(self, num_tokens: int) -> int:
        """Returns the memory that a copy of the KV of this many tokens takes."""
        return self._taken(self.copy_bytes + num_tokens * self.token_bytes, num_tokens) if self.token_bytes else 0

    def state_copy_bytes(self, num_tokens: int) -> int:
        """Returns the memory that a copy of a state takes; without KV, its label holds the tokens."""
        return self._taken(self.state_bytes, 0 if self.token_bytes else num_tokens)

    def _taken(self, num_bytes: int, num_tokens: int) -> int:
        if not self.slot_bytes:
            return num_bytes
        return self.slot_bytes * max(1, -(-num_bytes // self.slot_data_bytes), -(-num_tokens // self.slot_tokens))


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a started engine."""

    engine: str
    engine_version: str
    source: str
    fingerprint: str
    """Equal for engines whose KV and token ids are interchangeable."""
    context_length: int
    """The maximum tokens of one sequence, prompt and completion together."""
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_block_size: int
    total_kv_blocks: int
    """The blocks of the device's KV memory."""
    kv_tokens: int = 0
    """The tokens of KV memory allocated for all sequences together; 0 for an engine that only pools."""
    host_kv_blocks: int = 0
    """The number of blocks that host memory can hold copies of."""
    memory: MemoryPlan | None = None
    """The plan that its sizes come from; None if there was none."""
    checkpoint_sizes: CheckpointSizes | None = None
    """The sizes of checkpoints, if prefixes can be reused only at checkpoints and not at any block."""
    writes_through: bool = False
    """Whether blocks are copied to host memory as soon as they are complete."""
    idle_blocks_cost: bool = True
    """Whether cached blocks on the device that no sequence uses slow down the steps of running sequences."""
    prefix_cache: bool
    missing: dict[str, str] = {}
    """Abilities that other models have on this engine and this one does not, each with the reason: `prefix_cache`,
    `kv_exchange`, `recovery` (of copies, by the next engine), `batches`, `embeddings`, `router_tokenizing`,
    `reasoning_budget`."""
    vocab_size: int
    features: tuple[str, ...]
    defaults: SamplingParams
    """Sampling parameters that the model's files recommend."""
    versions: dict[str, str]
    pid: int
    files: dict[str, str] = {}
    """The files in which the model was found."""
    devices: tuple[EngineDevice, ...] = ()
    """The devices that compute it."""
    slow_weights: str = ""
    """The type of its weights, if the processor takes 1.5 to 2 times as long for prompts as with others of its size,
    and those others; else empty."""
    kv_bytes: int = 0
    """The device memory for the keys and values of all sequences; 0 where it is not known."""
    kv_lane_bytes: int = 0
    """The part of it that a lane takes, if lanes can be lent to other replicas of the process, so that `kv_bytes` is
    the most that it may hold; 0 if its memory is fixed."""
    embeddings: messages.CardEmbeddings | None = None
    """The embeddings that the engine makes, if it makes any."""
    end_token_ids: tuple[int, ...] = ()
    """The model's own end tokens."""
    chat_format: ChatFormat | None = None
    """The way the model writes reasoning and tool calls; None where that is not known."""
    kv_identity: str = ""
    """Equal for engines that can read each other's KV blocks; empty if this one exchanges none."""
    kv_format: KvBlockFormat | None = None
    """The form of its blocks, if it exchanges any."""


class Engine(Protocol):
    """Generates tokens; the guarantees are this module's docstring."""

    on_kv_events: Callable[[list[int], list[tuple[int, int]]], None]
    """Called with the hashes of removed and of new cached blocks, parents first, each new one after its parent's; the
    outputs of that step come later. By default it does nothing."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes of each token's text, by token id; empty before `start`."""
        ...

    async def start(self, worker_id: str) -> EngineConfig:
        """Loads the model. Raises ModelError when it can't be loaded."""
        ...

    def generate(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> None:
        """Accepts a request and returns at once. Raises RequestError, and does nothing, if it can't accept it."""
        ...

    def abort(self, key: str) -> None:
        """Ends a request with `cancelled`."""
        ...

    def release(self, key: str) -> None:
        """Releases a held request to the engine; does nothing for any other."""
        ...

    async def export_blocks(
        self, prefix: CachedPrefix, first: int, max_blocks: int, *, is_last: bool = False
    ) -> tuple[int, list[bytes]]:
        """Returns how many leading blocks of a prefix are cached, and the contents of up to `max_blocks` of them from
        block `first` on. Raises RequestError.

        Once the last of them is returned, the caller has the whole prefix, and the engine need not keep it for long."""
        ...

    def put_blocks(self, prefix: CachedPrefix, first: int, blocks: list[bytes]) -> None:
        """Caches blocks of another engine with the same identity, from block `first` of a prefix on, for later
        requests. Blocks after one that is not cached, and blocks for which there is no room, are dropped."""
        ...

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The recent prefill speed; None before the first prompt."""
        ...

    async def tokenize(self, request: internal.Tokenize) -> list[int]:
        """Returns the token ids of a text or conversation. Raises RequestError."""
        ...

    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        """Returns the embeddings of all inputs. Raises RequestError.

        If the caller is cancelled, the remaining inputs are not computed. The same holds for `rerank`."""
        ...

    async def rerank(self, request: internal.Rerank) -> internal.RerankResult:
        """Returns the scores of all documents. Raises RequestError."""
        ...

    async def load_adapter(self, path: str) -> str:
        """Loads a LoRA adapter for later requests; returns the digest that names it in them. A file may be loaded
        several times. Raises RequestError if the file can't be used."""
        ...

    def unload_adapter(self, digest: str) -> None:
        """Reverses one `load_adapter`. Requests that use the adapter keep it."""
        ...

    def clear_cache(self) -> None:
        """Drops every cached block that no request uses."""
        ...

    def retain_session(self, tenant: str, session_id: str, ttl_s: float) -> None:
        """Keeps what a tenant's session has left in the cache for `ttl_s`, evicting it only after everything that no
        client asked to keep; with 0, what it alone has used is evicted first. Does nothing for an unknown session."""
        ...

    def expect_turn(self, turn: engine_request.ExpectedTurn) -> None:
        """Computes the prompt of a turn that is likely to come, while no request needs an engine with `next_turns`."""
        ...

    def tokenizer_bundle(self) -> bytes | None:
        """The packed `TokenizerBundle`; None if the engine has none that agrees with its own tokenizer."""
        ...

    def load(self) -> messages.Load:
        """The engine's load now."""
        ...

    async def died(self) -> str:
        """Returns the reason when the engine can't continue."""
        ...

    async def drain(self) -> None:
        """Returns when every accepted request has ended; it can be cancelled."""
        ...

    async def cleanup(self) -> None:
        """Ends all requests and frees what the engine holds."""
        ...


class ContractError(AssertionError):
    """An engine broke one of the rules above."""


_NOTHING = engine_output.Output()


class StreamValidator:
    """A sink that checks every output of a request before passing it on. It is used in tests, and in production with
    TOKENBUS_DEBUG=1."""

    def __init__(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> None:
        self._request = request
        self._sink = sink
        self._num_tokens = 0
        self._prompt_offset = request.sampling.prompt_logprobs_from or 0
        self._terminal: engine_output.Output | None = None

    def __repr__(self) -> str:
        return f"<StreamValidator of {self._request.key}: {self._num_tokens} tokens>"

    def __call__(self, output: engine_output.Output) -> None:
        """Raises ContractError."""
        self._require(self._terminal is None, "an output after the terminal")
        rest = msgspec.structs.replace(output, token_ids=[], text="", is_plain=False)
        self._require(not output.is_plain or rest == _NOTHING, "a plain output with more than tokens and text")
        self._check_resumed(output)
        self._check_prompt_logprobs(output)
        self._num_tokens += len(output.token_ids)
        self._require(self._num_tokens <= self._request.sampling.max_tokens, "more tokens than max_tokens")
        if output.finish_reason is None:
            self._require(output.usage is None and output.error is None, "only a terminal has usage or error")
        else:
            self._check_terminal(output)
            self._terminal = output
        self._sink(output)

    def _check_resumed(self, output: engine_output.Output) -> None:
        resumed, count = self._request.resumed, self._num_tokens
        given = list(resumed.token_ids) if resumed is not None else []
        self._require(output.is_resumed == (count < len(given)), "the given tokens are resumed, before all others")
        if output.resumed_texts is not None:
            self._require(output.token_ids == given, "a resumed output has other tokens than the given ones")
            self._require(len(output.resumed_texts) == len(given), "a resumed output has not one text for each token")
            self._require(output.text == "".join(output.resumed_texts), "a resumed output's texts are not its text")
        if output.first_token is not None:
            is_first = not count and bool(output.token_ids) and not output.is_resumed
            self._require(is_first, "first_token without the first token")

    def _check_prompt_logprobs(self, output: engine_output.Output) -> None:
        wanted, num_prompt = self._request.sampling.prompt_logprobs, len(self._request.token_ids)
        if output.prompt_logprobs:
            self._require(wanted is not None, "log probabilities of a prompt that were not asked for")
            self._require(output.prompt_offset == self._prompt_offset, "a gap in the prompt's log probabilities")
            self._prompt_offset += output.num_scored
            self._require(self._prompt_offset <= num_prompt, "more log probabilities than the prompt has tokens")
        if wanted is not None and output.token_ids and not output.is_resumed:
            self._require(self._prompt_offset >= num_prompt, "a token before the prompt's log probabilities")

    def _check_terminal(self, output: engine_output.Output) -> None:
        reason, sampling = output.finish_reason, self._request.sampling
        usage = output.usage
        if usage is None:
            raise ContractError(f"{self!r}: a terminal without usage")
        self._require(usage.completion_tokens == self._num_tokens, "completion_tokens is not the number of tokens")
        self._require(usage.prompt_tokens == len(self._request.token_ids), "prompt_tokens is not the prompt's length")
        self._require(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "usage does not add up")
        self._require(
            (reason is messages.FinishReason.ERROR) == (output.error is not None), "error and reason disagree"
        )
        self._require(
            reason is not messages.FinishReason.LENGTH
            or self._num_tokens == (0 if self._request.is_warm_up else sampling.max_tokens),
            "length with fewer than max_tokens",
        )
        self._require(
            (reason is messages.FinishReason.STOP) == (output.stop_match is not None), "stop and stop_match disagree"
        )
        if reason is messages.FinishReason.STOP and self._request.constraint is None:
            self._require(self._num_tokens > sampling.min_tokens, "stop within min_tokens")
        if reason in _REASONS_WITH_TOKENS:
            self._require(output.timings is not None, "a terminal without timings")

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            raise ContractError(f"{self!r}: {rule}")
