"""Embeddings beside generations: the step loop computes one batch of inputs between two steps."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog

from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.engine.runner import Embedder, InsufficientMemoryError

_MIN_NORM = 1e-12
"""Shorter vectors are divided by this instead of their norm, which may be 0."""


class EmbedJob:
    """The inputs of one request, and the vectors that are computed."""

    __slots__ = ("call_id", "deadline", "inputs", "pending", "request", "rows")

    def __init__(self, call_id: int, inputs: list[list[int]], request: internal.Embed, deadline: float) -> None:
        self.call_id = call_id
        self.inputs = inputs
        self.request = request
        self.deadline = deadline
        self.pending = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        """The indices of inputs still to be computed, the longest last: a batch holds inputs of similar length."""
        self.rows: dict[int, Any] = {}

    def next_batch(self, max_tokens: int) -> list[int]:
        """Takes the next inputs to compute together: at most `max_tokens` with padding, but at least one input."""
        taken = [self.pending.pop()]
        longest = len(self.inputs[taken[0]])
        while self.pending and longest * (len(taken) + 1) <= max_tokens:
            taken.append(self.pending.pop())
        return taken


def make_job(call_id: int, request: internal.Embed, embedder: Embedder | None, now: float) -> EmbedJob:
    """Checks a request and tokenizes its texts. Raises RequestError for inputs that can't be computed."""
    if embedder is None:
        raise errors.request_error(errors.Code.UNSUPPORTED, "this model makes no embeddings", param="model")
    if request.dimensions is not None and request.dimensions > embedder.width:
        raise errors.request_error(
            errors.Code.INVALID_REQUEST,
            f"dimensions: must be at most {embedder.width}, got {request.dimensions}",
            param="dimensions",
        )
    inputs = [_to_token_ids(one, index, embedder) for index, one in enumerate(request.inputs)]
    return EmbedJob(call_id, inputs, request, now + request.remaining_ms / 1e3)


def _to_token_ids(one: str | list[int], index: int, embedder: Embedder) -> list[int]:
    ids = embedder.tokenize(one) if isinstance(one, str) else one
    param = f"input[{index}]"
    if not 0 < len(ids) <= embedder.max_input_tokens:
        raise errors.request_error(
            errors.Code.PROMPT_TOO_LONG,
            f"{param} has {len(ids)} tokens, 1 to {embedder.max_input_tokens} fit",
            param=param,
        )
    if max(ids) >= embedder.vocab_size:
        raise errors.request_error(
            errors.Code.INVALID_REQUEST,
            f"{param} has token id {max(ids)}, the vocabulary has {embedder.vocab_size} tokens",
            param=param,
        )
    return ids


class EmbedQueue:
    """The jobs of one replica, one after another. `report` is called with the call id and result of each."""

    def __init__(
        self, embedder: Embedder | None, max_tokens: int, report: Callable[[int, internal.EmbedResult], None]
    ) -> None:
        self._embedder = embedder
        self._max_tokens = max_tokens
        self._report = report
        self._jobs: deque[EmbedJob] = deque()

    def __repr__(self) -> str:
        return f"<EmbedQueue, {len(self._jobs)} jobs>"

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def add(self, job: EmbedJob) -> None:
        self._jobs.append(job)

    def step(self) -> None:
        """Computes a batch of the first job, and reports it if it was the last. Raises DeviceError."""
        if not self._jobs:
            return
        assert self._embedder is not None
        job = self._jobs[0]
        if time.monotonic() > job.deadline:
            self._end(job, internal.EmbedResult(error=errors.make_error(errors.Code.DEADLINE_EXCEEDED)))
            return
        pending = job.next_batch(self._max_tokens)
        try:
            found = self._embedder.embed([job.inputs[index] for index in pending])
        except InsufficientMemoryError:
            self._end(job, internal.EmbedResult(error=errors.make_error(errors.Code.INSUFFICIENT_MEMORY)))
            return
        job.rows |= dict(zip(pending, found, strict=True))
        if not job.pending:
            self._end(job, _reply(job))

    def _end(self, job: EmbedJob, reply: internal.EmbedResult) -> None:
        self._jobs.popleft()
        self._report(job.call_id, reply)


def _reply(job: EmbedJob) -> internal.EmbedResult:
    vectors = np.stack([job.rows[index] for index in range(len(job.inputs))])[:, : job.request.dimensions]
    if not np.isfinite(vectors).all():
        structlog.get_logger().error("bad_embeddings", inputs=len(job.inputs))
        error = errors.make_error(errors.Code.INTERNAL, "the model computed values that are not numbers")
        return internal.EmbedResult(error=error)
    if job.request.normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, _MIN_NORM)
    return internal.EmbedResult(
        vectors=np.ascontiguousarray(vectors, "<f4").tobytes(), prompt_tokens=sum(map(len, job.inputs))
    )
