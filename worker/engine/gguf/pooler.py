"""Computes one row of numbers per input, with a separate llama.cpp context for embeddings.

Every input of a batch is one of llama.cpp's sequences. Most poolings read all states of an input, so it has to be
computed in one ubatch, as attention between all its tokens requires too. If only the last token's state of a causal
model is read, the tokens before it need no output and go through in ubatches of any size: llama.cpp would compute the
logits of every output, a third of the work for a small model with a large vocabulary."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listing

import numpy as np
import structlog
from llama_cpp import llama_cpp as llama

from tokenbus.protocol.wire import codec, messages
from tokenbus.worker.contract.engine_errors import DeviceError, InsufficientMemoryError, ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.pooling import PoolingRunner
from tokenbus.worker.engine.device.runner import BatchLimits, WholePass
from tokenbus.worker.engine.gguf import model_facts, settings_resolution
from tokenbus.worker.engine.gguf.context import BatchPart, PoolingContext, PoolingSize
from tokenbus.worker.engine.gguf.model import GgufModel
from tokenbus.worker.engine.gguf.model_facts import PoolingType
from tokenbus.worker.tokenizers.gguf_tokenizer import RerankPrompt

_CLOSE = 1e-2
"""The largest difference, as a share of a row's length, between a row computed alone and in a batch."""
_MAX_INPUT_TOKENS = 8_192
"""The default longest input: attention memory grows with its square."""
POOLED_INPUTS = 64
"""The most inputs that are pooled in one batch. Each costs a row of logits in host memory, if the model has them."""


class CausalEmbedder:
    """Makes embeddings with a model that generates, in a context separate from that of the streams.

    One context could do both: embeddings can be turned on and off between decodes. But inputs would then lie in the
    same cells, and attention runs over all of them, so streams would become slower and round differently. In a separate
    context, nothing that is embedded affects a stream or the prefix cache (decision 0030).

    In a causal model a token's state does not depend on what follows, so inputs can be split anywhere: a pass computes
    as many tokens as it is told to, and streams take a step in between. llama.cpp computes the logits of every token
    whose state it returns. `last` needs one state per input, and `mean` all of them.

    `settings` are the resolved ones of the streams' context, and `context_length` is its tokens per sequence.

    Its own context is made for the first input, or at once if the settings name the pooling. Raises ModelError for
    settings that the model can't meet."""

    def __init__(self, model: GgufModel, settings: EngineSettings, context_length: int) -> None:
        self.pooling = "last" if settings.pooling == "auto" else settings.pooling
        if self.pooling not in ("last", "mean"):
            raise ModelError(
                f"--pooling {self.pooling} is not for a model that generates, whose first token sees no other: pass "
                "last, mean or none"
            )
        if settings.max_embed_tokens > context_length:
            raise ModelError(
                f"--max-embed-tokens {settings.max_embed_tokens} is above the context of one sequence, {context_length}"
            )
        self.vocab_size = model.tokenizer.size
        self.width = int(llama.llama_model_n_embd_out(model.handle))
        self.max_input_tokens = model_facts.embed_tokens(settings, context_length)
        # Attention runs over the cells of a whole batch, though an input sees only its own.
        most = min(settings.ubatch_tokens, settings.max_num_batched_tokens)
        keeps_states = llama.llama_model_is_recurrent(model.handle) or llama.llama_model_is_hybrid(model.handle)
        max_inputs = 1 if keeps_states else model_facts.EMBEDDED_INPUTS  # each would have a recurrent state
        self.batch_limits = BatchLimits(most, max_inputs, is_padded=False)
        outputs = model_facts.embed_outputs(settings)
        self._size = PoolingSize(max(self.max_input_tokens, most), max_inputs, outputs, settings.ubatch_tokens)
        self._model = model
        self._settings = settings
        self._context: PoolingContext | None = None
        self._is_dirty = False
        """Whether cells may hold NaN or infinity."""
        if settings.pooling != "auto":
            self._context = self._open()

    def __repr__(self) -> str:
        return f"<CausalEmbedder of {self.width}, {self.pooling}, {self._context!r}>"

    def describe(self) -> messages.CardEmbeddings:
        return messages.CardEmbeddings(
            dimensions=self.width, pooling=self.pooling, max_input_tokens=self.max_input_tokens
        )

    def tokenize(self, text: str) -> list[int]:
        return self._model.tokenizer.encode_with_special_tokens(text)

    def begin(self, inputs: Listing[Listing[int]]) -> CausalPass:
        if self._context is None:
            self._context = self._open_late()
        self._context.clear(overwrites=self._is_dirty)
        self._is_dirty = True  # until the pass has ended with finite rows
        return CausalPass(self, inputs)

    def decode(self, parts: list[BatchPart], *, has_outputs: bool) -> Matrix | None:
        """Computes parts of the inputs of the last pass; returns the states of their tokens, if they have outputs."""
        assert self._context is not None
        self._context.decode(parts, has_outputs=has_outputs)
        return self._context.states(sum(len(part.token_ids) for part in parts), self.width) if has_outputs else None

    def max_tokens(self, *, has_outputs: bool) -> int:
        """Returns the most tokens of one decode."""
        return self._size.outputs if has_outputs else self._size.ubatch_tokens

    def end(self, rows: Matrix) -> None:
        """Notes that a pass has ended with these rows. Rows that depend only on the last window may be finite even if
        earlier cells are not."""
        has_window = llama.llama_model_n_swa(self._model.handle) > 0
        self._is_dirty = has_window or not np.isfinite(rows).all()

    def close(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None

    def _open_late(self) -> PoolingContext:
        """Raises InsufficientMemoryError if there is not enough memory now; there may be later."""
        log, began = structlog.get_logger(), time.monotonic()
        try:
            context = self._open()
        except ModelError as error:
            log.error("embedding_context_failed", reason=str(error))
            raise InsufficientMemoryError(str(error)) from error
        duration_ms = round((time.monotonic() - began) * 1e3)
        log.info("embedding_context_created", tokens=self._size.tokens, duration_ms=duration_ms)
        return context

    def _open(self) -> PoolingContext:
        return PoolingContext(
            self._model.handle, self._settings, llama.LLAMA_POOLING_TYPE_NONE, self._size, "--max-embed-tokens"
        )


class CausalPass:
    """A pass over a batch of inputs, each of which is one of llama.cpp's sequences."""

    def __init__(self, embedder: CausalEmbedder, inputs: Listing[Listing[int]]) -> None:
        self._embedder = embedder
        if embedder.pooling == "mean":
            before, last = [], [BatchPart(number, 0, one) for number, one in enumerate(inputs)]
        else:
            before = [BatchPart(number, 0, one[:-1]) for number, one in enumerate(inputs) if len(one) > 1]
            last = [BatchPart(number, len(one) - 1, one[-1:]) for number, one in enumerate(inputs)]
        self._without_outputs, self._with_outputs = deque(before), deque(last)
        self._counts = np.array([len(part.token_ids) for part in last])
        self._sums = np.zeros((len(inputs), embedder.width), np.float64)

    def __repr__(self) -> str:
        return f"<CausalPass over {len(self._sums)} inputs>"

    def advance(self, max_tokens: int) -> Matrix | None:
        left = max_tokens
        while left > 0 and (self._without_outputs or self._with_outputs):
            has_outputs = not self._without_outputs
            parts = self._with_outputs if has_outputs else self._without_outputs
            piece = _take(parts, min(left, self._embedder.max_tokens(has_outputs=has_outputs)))
            states = self._embedder.decode(piece, has_outputs=has_outputs)
            if states is not None:
                self._add(piece, states)
            left -= sum(len(part.token_ids) for part in piece)
        if self._without_outputs or self._with_outputs:
            return None
        rows: Matrix = (self._sums / self._counts[:, None]).astype(np.float32)
        self._embedder.end(rows)
        return rows

    def _add(self, piece: Iterable[BatchPart], states: Matrix) -> None:
        at = 0
        for part in piece:
            end = at + len(part.token_ids)
            with np.errstate(invalid="ignore"):  # NaN and infinity are found in the rows
                self._sums[part.number] += states[at:end].sum(axis=0, dtype=np.float64)
            at = end


def _take(parts: deque[BatchPart], count: int) -> list[BatchPart]:
    """Removes the first `count` tokens from parts, splitting the last one if necessary."""
    taken: list[BatchPart] = []
    while parts and count > 0:
        number, start, token_ids, _ = parts.popleft()
        if len(token_ids) > count:
            parts.appendleft(BatchPart(number, start + count, token_ids[count:]))
            token_ids = token_ids[:count]
        taken.append(BatchPart(number, start, token_ids))
        count -= len(token_ids)
    return taken


class GgufPooler:
    """Raises ModelError for settings that the model can't meet, and if it can't compute a first row."""

    def __init__(self, model: GgufModel, settings: EngineSettings) -> None:
        self.vocab_size = model.tokenizer.size
        trained, asked = llama.llama_model_n_ctx_train(model.handle), settings.context_length
        if asked > trained:  # an input never has more tokens than the model has positions
            raise ModelError(f"--context-length {asked} is above what the model was made for, {trained}")
        self.max_input_tokens = asked or min(trained, _MAX_INPUT_TOKENS)
        # Attention cost grows with the square of a batch's tokens, though an input sees only itself, so larger batches
        # are slower.
        most = min(settings.ubatch_tokens, settings.max_num_batched_tokens)
        capacity = max(self.max_input_tokens, most)
        self.batch_limits = BatchLimits(most, POOLED_INPUTS, is_padded=False)
        self._pooling = _pooling_of(model, settings)
        outputs_all = self._pooling in (PoolingType.MEAN, PoolingType.CLS)
        self._context = self._open(model, settings, capacity, outputs_all=outputs_all)
        if not self._outputs_all and not self._context.is_causal:
            self.close()
            self._context = self._open(model, settings, capacity, outputs_all=True)
        width_of = llama.llama_model_n_cls_out if model.pooling is PoolingType.RANK else llama.llama_model_n_embd_out
        self.width = int(width_of(model.handle))
        self._try(str(model.files.weights))

    def __repr__(self) -> str:
        return f"<GgufPooler of {self.width}, {self._pooling.name.lower()}>"

    def _open(self, model: GgufModel, settings: EngineSettings, capacity: int, *, outputs_all: bool) -> PoolingContext:
        self._outputs_all = outputs_all
        size = PoolingSize(
            capacity,
            POOLED_INPUTS,
            outputs=capacity if outputs_all else POOLED_INPUTS,
            # Reading all states of an input, and attention between all of them, need the input in one ubatch.
            ubatch_tokens=capacity if outputs_all else settings.ubatch_tokens,
        )
        return PoolingContext(model.handle, settings, self._pooling.value, size, "--context-length")

    def begin(self, inputs: Listing[Listing[int]]) -> WholePass:
        return WholePass(self.pool, inputs)

    def pool(self, inputs: Listing[Listing[int]]) -> Matrix:
        """Returns a row for each input, (inputs, width)."""
        self._context.clear(overwrites=False)  # the cells' old contents are finite
        if self._outputs_all:
            self._context.decode((BatchPart(number, 0, one) for number, one in enumerate(inputs)), has_outputs=True)
        else:
            before = [BatchPart(number, 0, one[:-1]) for number, one in enumerate(inputs)]
            last = [BatchPart(number, len(one) - 1, one[-1:]) for number, one in enumerate(inputs)]
            self._context.decode(before, has_outputs=False)
            self._context.decode(last, has_outputs=True)
        rows = np.stack([self._context.row(number, self.width) for number in range(len(inputs))])
        if not np.isfinite(rows).all():
            self._context.clear(overwrites=True)
        return rows

    def close(self) -> None:
        self._context.close()

    def _try(self, where: str) -> None:
        """Checks that two inputs give the same rows alone and together."""
        lengths = [min(length, self.max_input_tokens) for length in (7, 4)]
        inputs = [[1 + place % (self.vocab_size - 1) for place in range(length)] for length in lengths]
        try:
            alone = np.concatenate([self.pool([one]) for one in inputs])
            together = self.pool(inputs)
        except (DeviceError, InsufficientMemoryError) as error:
            self.close()
            raise ModelError(f"{where}: llama.cpp can't compute a first embedding: {error}") from error
        difference = np.linalg.norm(alone - together, axis=1)
        if not (difference <= _CLOSE * np.linalg.norm(alone, axis=1)).all():
            self.batch_limits = self.batch_limits._replace(max_inputs=1)


class GgufEmbedder(GgufPooler):
    """Makes embeddings."""

    def __init__(self, model: GgufModel, settings: EngineSettings) -> None:
        self._tokenizer = model.tokenizer
        super().__init__(model, settings)

    def describe(self) -> messages.CardEmbeddings:
        return messages.CardEmbeddings(
            dimensions=self.width, pooling=self._pooling.name.lower(), max_input_tokens=self.max_input_tokens
        )

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode_with_special_tokens(text)


class GgufReranker(GgufPooler):
    """Scores documents, as llama.cpp's server does: with the file's template `rerank`, if it has one."""

    def __init__(self, model: GgufModel, settings: EngineSettings) -> None:
        self._prompt = _rerank_prompt(model)
        labels = int(llama.llama_model_n_cls_out(model.handle))
        # A file with two labels has "yes" first, and llama.cpp turns them into probabilities.
        if labels > 2 or (labels == 2 and not (model.metadata.text("general.architecture") or "").startswith("qwen3")):
            raise ModelError(f"{model.files.weights}: sorts texts into {labels} classes, none of which is a score")
        super().__init__(model, settings)

    def pair(self, query: str, documents: Listing[str]) -> list[list[int]]:
        return self._prompt.make(query, documents)


def _rerank_prompt(model: GgufModel) -> RerankPrompt:
    tokenizer, template = model.tokenizer, model.metadata.text("tokenizer.chat_template.rerank")
    if template is None:
        return RerankPrompt.from_tokens(tokenizer.pair_tokens, tokenizer.encode)
    return RerankPrompt.from_template(template, tokenizer.rules.special_tokens, tokenizer.encode)


def make_runner(model: GgufModel, settings: EngineSettings, release: Callable[[], None]) -> PoolingRunner:
    """Returns a replica of a model that generates nothing. `release` is called once the model isn't needed.

    Raises ModelError for settings that the model can't meet."""
    resolved = settings_resolution.resolve(settings, model.generation_config)
    is_reranker = model.pooling is PoolingType.RANK
    pooler = GgufReranker(model, resolved) if is_reranker else GgufEmbedder(model, resolved)
    config = model.describe(resolved, pooler.max_input_tokens, ("rerank" if is_reranker else "embed",))
    if isinstance(pooler, GgufEmbedder):
        config = codec.replace(config, embeddings=pooler.describe())

    def close() -> None:
        pooler.close()
        release()

    return PoolingRunner(
        config,
        model.tokenizer,
        model.device_memory,
        close,
        embedder=pooler if isinstance(pooler, GgufEmbedder) else None,
        reranker=pooler if isinstance(pooler, GgufReranker) else None,
    )


def _pooling_of(model: GgufModel, settings: EngineSettings) -> PoolingType:
    """Returns the pooling that a setting names, else that of the model's file."""
    assert model.pooling is not None
    if settings.pooling == "auto":
        return model.pooling
    if settings.pooling == "none" or model.pooling is PoolingType.RANK:
        does = "score documents" if model.pooling is PoolingType.RANK else "make embeddings"
        raise ModelError(f"{model.files.weights} can only {does}: leave --pooling {settings.pooling} out")
    return PoolingType[settings.pooling.upper()]
