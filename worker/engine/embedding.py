"""Embeddings beside generations: inputs are computed a batch at a time, between the steps of what is generated."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog

from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.engine.runner import Embedder, InsufficientMemoryError

_SMALLEST_LENGTH = 1e-12
"""Vectors that are shorter stay as they are."""


class EmbedJob:
    """The inputs of one request, and how far they are computed."""

    __slots__ = ("call_id", "deadline", "inputs", "places", "request", "rows")

    def __init__(self, call_id: int, inputs: list[list[int]], request: internal.Embed, deadline: float) -> None:
        self.call_id = call_id
        self.inputs = inputs
        self.request = request
        self.deadline = deadline
        self.places = sorted(range(len(inputs)), key=lambda place: len(inputs[place]))
        """Inputs that are still to be computed, the longest last: those that are alike in length go together."""
        self.rows: dict[int, Any] = {}

    def take(self, most_tokens: int) -> list[int]:
        """The next inputs to compute together: padded to the longest, no more tokens than that, but at least one."""
        taken = [self.places.pop()]
        longest = len(self.inputs[taken[0]])
        while self.places and longest * (len(taken) + 1) <= most_tokens:
            taken.append(self.places.pop())
        return taken


def make_job(call_id: int, request: internal.Embed, embedder: Embedder | None, now: float) -> EmbedJob:
    """Raises RequestError for inputs that can't be computed."""
    if embedder is None:
        raise errors.request_error(errors.Code.UNSUPPORTED, "this model makes no embeddings", param="model")
    if request.dimensions is not None and request.dimensions > embedder.width:
        raise errors.request_error(
            errors.Code.INVALID_REQUEST,
            f"dimensions: must be at most {embedder.width}, got {request.dimensions}",
            param="dimensions",
        )
    inputs = [_checked(one, place, embedder) for place, one in enumerate(request.inputs)]
    return EmbedJob(call_id, inputs, request, now + request.remaining_ms / 1e3)


def _checked(one: str | list[int], place: int, embedder: Embedder) -> list[int]:
    ids = embedder.tokenize(one) if isinstance(one, str) else one
    param = f"input[{place}]"
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
    """The jobs of one replica, one after another. `report` is told what came of each."""

    def __init__(
        self, embedder: Embedder | None, most_tokens: int, report: Callable[[int, internal.EmbedResult], None]
    ) -> None:
        self._embedder = embedder
        self._most_tokens = most_tokens
        self._report = report
        self._jobs: deque[EmbedJob] = deque()

    def __repr__(self) -> str:
        return f"<Embeddings, {len(self._jobs)} jobs>"

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def add(self, job: EmbedJob) -> None:
        self._jobs.append(job)

    def step(self) -> None:
        """Computes a batch of the first job, and hands it out if it was the last. Raises DeviceError."""
        if not self._jobs:
            return
        assert self._embedder is not None
        job = self._jobs[0]
        if time.monotonic() > job.deadline:
            self._end(job, internal.EmbedResult(error=errors.make_error(errors.Code.DEADLINE_EXCEEDED)))
            return
        places = job.take(self._most_tokens)
        try:
            found = self._embedder.embed([job.inputs[place] for place in places])
        except InsufficientMemoryError:
            self._end(job, internal.EmbedResult(error=errors.make_error(errors.Code.INSUFFICIENT_MEMORY)))
            return
        job.rows |= dict(zip(places, found, strict=True))
        if not job.places:
            self._end(job, _reply(job))

    def _end(self, job: EmbedJob, reply: internal.EmbedResult) -> None:
        self._jobs.popleft()
        self._report(job.call_id, reply)


def _reply(job: EmbedJob) -> internal.EmbedResult:
    vectors = np.stack([job.rows[place] for place in range(len(job.inputs))])[:, : job.request.dimensions]
    if not np.isfinite(vectors).all():
        structlog.get_logger().error("bad_embeddings", inputs=len(job.inputs))
        return internal.EmbedResult(error=errors.make_error(errors.Code.INTERNAL, "the model computed no numbers"))
    if job.request.normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, _SMALLEST_LENGTH)
    return internal.EmbedResult(
        vectors=np.ascontiguousarray(vectors, "<f4").tobytes(), prompt_tokens=sum(map(len, job.inputs))
    )
