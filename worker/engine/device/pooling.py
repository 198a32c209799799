"""Inputs that each become one row of numbers: the step loop computes a batch between two steps of generation."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import structlog

from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.chat_format.reasoning_budget import ReasoningCloser
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.contract.engine_errors import InsufficientMemoryError
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.runner import Embedder, Pooler, PoolingPass, Reranker, RunnerAdapters
from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.kv.ops import KvOp
from tokenbus.worker.engine.scheduling.plan import Outcome, StepPlan
from tokenbus.worker.engine.scheduling.row_tiles import RowTiles
from tokenbus.worker.engine.scheduling.step_budget import StepBudget
from tokenbus.worker.files.device_memory import DeviceMemory

if TYPE_CHECKING:  # the engine process would load jinja2 with it, whatever its model
    from tokenbus.worker.tokenizers.model_tokenizer import ModelTokenizer

_MIN_NORM = 1e-12
"""Shorter vectors are divided by this instead of their norm, which may be 0."""


class PoolingJob:
    """The inputs of one request, and the rows computed so far."""

    def __init__(
        self,
        call_id: int,
        request: internal.Embed | internal.Rerank,
        inputs: list[list[int]],
        pooler: Pooler,
        now: float,
        finish: Callable[[Matrix], Matrix],
    ) -> None:
        """`finish` turns the pooler's rows into those of the answer."""
        self.call_id = call_id
        self.tenant = request.tenant
        self.inputs = inputs
        self.pooler = pooler
        self.deadline = now + request.remaining_ms / 1e3
        self.finish = finish
        self.pending = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        """The indices of inputs still to be computed, the longest last: a batch holds inputs of similar length."""
        self.alone: set[int] = set()
        """Those of them that are computed alone, because their rows were not finite in a batch with others."""
        self.rows: dict[int, Any] = {}

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.inputs))


class PoolingResult(NamedTuple):
    """The rows of a job, or the error."""

    rows: bytes = b""
    """32-bit little-endian floats."""
    prompt_tokens: int = 0
    error: errors.Error | None = None


def embed_job(call_id: int, request: internal.Embed, embedder: Embedder | None, now: float) -> PoolingJob:
    """Checks a request and tokenizes its texts. Raises RequestError for inputs that can't be computed."""
    if embedder is None:
        raise errors.request_error(errors.Code.UNSUPPORTED, "this model makes no embeddings", param="model")
    if request.dimensions is not None and request.dimensions > embedder.width:
        raise errors.request_error(
            errors.Code.INVALID_REQUEST,
            f"dimensions: must be at most {embedder.width}, got {request.dimensions}",
            param="dimensions",
        )
    inputs = [embedder.tokenize(one) if isinstance(one, str) else one for one in request.inputs]
    for index, token_ids in enumerate(inputs):
        _check_input(f"input[{index}]", token_ids, embedder)

    def finish(rows: Matrix) -> Matrix:
        vectors = rows[:, : request.dimensions]
        if not request.normalize:
            return vectors
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        normalized: Matrix = vectors / np.maximum(lengths, _MIN_NORM)
        return normalized

    return PoolingJob(call_id, request, inputs, embedder, now, finish)


def rerank_job(call_id: int, request: internal.Rerank, reranker: Reranker | None, now: float) -> PoolingJob:
    """Checks a request and tokenizes its documents. Raises RequestError for those that can't be scored."""
    if reranker is None:
        raise errors.request_error(errors.Code.UNSUPPORTED, "this model scores no documents", param="model")
    inputs = reranker.pair(request.query, request.documents)
    for index, token_ids in enumerate(inputs):
        _check_input(f"documents[{index}]", token_ids, reranker, "with the query ")
    return PoolingJob(call_id, request, inputs, reranker, now, lambda rows: rows[:, :1])


def _check_input(param: str, token_ids: list[int], pooler: Pooler, beside: str = "") -> None:
    """Raises RequestError for an input that can't be computed; `beside` names what else it contains."""
    if not 0 < len(token_ids) <= pooler.max_input_tokens:
        raise errors.request_error(
            errors.Code.PROMPT_TOO_LONG,
            f"{param} has {beside}{len(token_ids)} tokens, 1 to {pooler.max_input_tokens} fit",
            param=param,
        )
    if max(token_ids) >= pooler.vocab_size:
        raise errors.request_error(
            errors.Code.INVALID_REQUEST,
            f"{param} has token id {max(token_ids)}, the vocabulary has {pooler.vocab_size} tokens",
            param=param,
        )


class PoolingQueue:
    """The jobs of one replica. Tenants take turns, a batch each, and so do the jobs of a tenant; a batch may hold
    inputs of several jobs.

    A batch is computed piece by piece if the pooler can split it, so that streams need not wait for all of it. `began`
    is called with the call ids of the batch before each piece is computed, and with none when that is done; `report`
    with the call id and the result of each job. `budget` learns how fast pieces are computed."""

    def __init__(
        self,
        began: Callable[[list[int]], None],
        report: Callable[[int, PoolingResult], None],
        budget: StepBudget,
    ) -> None:
        self._began = began
        self._report = report
        self._budget = budget
        self._jobs: deque[PoolingJob] = deque()
        self._batch: list[tuple[PoolingJob, int]] = []
        """The inputs being computed, each as an index into its job."""
        self._pass: PoolingPass | None = None
        self._uncomputed = 0
        """The number of tokens of the batch still to be computed."""

    def __repr__(self) -> str:
        return f"<PoolingQueue, {len(self._jobs)} jobs>"

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def add(self, job: PoolingJob) -> None:
        self._jobs.append(job)

    def abort(self, call_id: int) -> None:
        """Drops a job, whose result is not reported; it may have ended."""
        for job in [job for job in self._jobs if job.call_id == call_id]:
            self._drop(job)

    def step(self, seconds: float, *, is_alone: bool) -> None:
        """Computes as much of a batch as the time is likely to allow, and reports the jobs that it completes. Raises
        DeviceError.

        Unless the jobs are alone, a batch is as small as a piece, since not every pooler can split one."""
        self._end_late(time.monotonic())
        if not self._jobs:
            return
        max_tokens = self._budget.tokens_within(seconds)
        self._batch = self._batch or self._next_batch(None if is_alone else max_tokens)
        self._began(sorted({job.call_id for job, _ in self._batch}))
        self._compute(max_tokens)
        self._began([])  # not after an error, which belongs to the batch

    def _compute(self, max_tokens: int) -> None:
        try:
            if self._pass is None:
                inputs = [job.inputs[index] for job, index in self._batch]
                self._pass, self._uncomputed = self._batch[0][0].pooler.begin(inputs), sum(map(len, inputs))
            began = time.monotonic()
            rows = self._pass.advance(max_tokens)
        except InsufficientMemoryError:
            for job in self._jobs_of(self._batch):
                self._end(job, PoolingResult(error=errors.make_error(errors.Code.INSUFFICIENT_MEMORY)))
            return
        num_tokens = max_tokens if rows is None else self._uncomputed
        self._uncomputed -= num_tokens
        self._budget.observe(num_tokens, time.monotonic() - began)
        if rows is not None:
            self._take(rows)

    def _take(self, rows: Matrix) -> None:
        """Gives the rows of the batch to their jobs, and ends the jobs that are complete."""
        batch, self._batch, self._pass = self._batch, [], None
        for (job, index), row in zip(batch, rows, strict=True):
            if len(batch) > 1 and not np.isfinite(row).all():  # another input's numbers may be the cause
                job.pending.append(index)
                job.alone.add(index)
            else:
                job.rows[index] = row
        self._end_turn(batch[0][0])
        for job in self._jobs_of(batch):
            if not job.pending:
                self._end(job, _result(job))

    def _end_turn(self, job: PoolingJob) -> None:
        """Puts the jobs of other tenants before those of this job's tenant, and these before the job itself: even a job
        of thousands of inputs, or a thousand jobs, make other tenants wait for only one batch at a time."""
        self._jobs = deque(sorted(self._jobs, key=lambda one: (one.tenant == job.tenant) + (one is job)))

    def _jobs_of(self, batch: list[tuple[PoolingJob, int]]) -> list[PoolingJob]:
        """Returns the jobs that have inputs in a batch and have not been dropped since it began."""
        return [job for job in dict.fromkeys(job for job, _ in batch) if job in self._jobs]

    def _end_late(self, now: float) -> None:
        for job in [job for job in self._jobs if now > job.deadline]:
            self._end(job, PoolingResult(error=errors.make_error(errors.Code.DEADLINE_EXCEEDED)))

    def _next_batch(self, max_tokens: int | None) -> list[tuple[PoolingJob, int]]:
        """Takes inputs of the job whose turn it is, then of the following ones, while there is room."""
        pooler = self._jobs[0].pooler
        limits = pooler.batch_limits
        if max_tokens is not None:
            limits = limits._replace(max_tokens=min(max_tokens, limits.max_tokens))
        batch: list[tuple[PoolingJob, int]] = []
        total = longest = 0
        for job in self._jobs:
            while job.pooler is pooler and job.pending:
                length = len(job.inputs[job.pending[-1]])
                if job.pending[-1] in job.alone:
                    return batch or [(job, job.pending.pop())]
                if not limits.allow(len(batch) + 1, total + length, max(longest, length)):
                    break
                total, longest = total + length, max(longest, length)
                batch.append((job, job.pending.pop()))
        return batch

    def _end(self, job: PoolingJob, result: PoolingResult) -> None:
        self._drop(job)
        self._report(job.call_id, result)

    def _drop(self, job: PoolingJob) -> None:
        """Forgets a job, and the batch if it has no other job's inputs."""
        self._jobs.remove(job)
        if not any(one in self._jobs for one, _ in self._batch):
            self._batch, self._pass = [], None


def _result(job: PoolingJob) -> PoolingResult:
    rows = np.stack([job.rows[index] for index in range(len(job.inputs))])
    if not np.isfinite(rows).all():
        structlog.get_logger().error("bad_embeddings", inputs=len(job.inputs))
        return PoolingResult(
            error=errors.make_error(errors.Code.INTERNAL, "the model computed values that are not numbers")
        )
    return PoolingResult(np.ascontiguousarray(job.finish(rows), "<f4").tobytes(), job.num_tokens)


class PoolingRunner:
    """One replica of such a model. The frontend refuses requests to generate, since it lacks the feature."""

    def __init__(
        self,
        config: contract.EngineConfig,
        tokenizer: "ModelTokenizer",
        device_memory: Callable[[], list[DeviceMemory]],
        close: Callable[[], None],
        *,
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self.token_bytes: list[bytes] = []
        self.bundle: bytes | None = None
        self.copies: SlotStore | None = None
        self.embedder = embedder
        self.reranker = reranker
        self.reasoning_closer: ReasoningCloser | None = None
        self.end_token_ids: frozenset[int] = frozenset()
        self.num_lanes = 1
        self.row_tiles: RowTiles | None = None
        self.logits = None
        self.prompt_scores = None
        self.canary: Listing[int] = ()
        self.adapters: RunnerAdapters | None = None
        self._device_memory = device_memory
        self._close = close

    def __repr__(self) -> str:
        return f"<PoolingRunner {self.config.source} {self.embedder or self.reranker!r}>"

    def add_sequence(self, seq_no: int, sampling: engine_request.Sampling) -> None:
        raise AssertionError("this model generates nothing")

    def remove_sequence(self, seq_no: int) -> None:
        """Does nothing: no sequence was ever added."""

    def apply(self, kv_ops: Listing[KvOp]) -> None:
        assert not kv_ops, kv_ops

    def step(self, plan: StepPlan) -> list[Outcome]:
        raise AssertionError("this model generates nothing")

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        return self._tokenizer.tokenize(request)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def device_memory(self) -> list[DeviceMemory]:
        return self._device_memory()

    def close(self) -> None:
        self._close()
