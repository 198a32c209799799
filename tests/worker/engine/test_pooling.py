"""Requests for embeddings share batches, take turns, and end by their own deadlines."""

import time
from collections.abc import Sequence as Listing

import numpy as np
import pytest

from tokenbus.protocol.wire import errors, internal, messages
from tokenbus.worker.engine import pooling
from tokenbus.worker.engine.draws import Matrix
from tokenbus.worker.engine.pooling import PoolingQueue, PoolingResult
from tokenbus.worker.engine.runner import BatchLimits, InsufficientMemoryError, PoolingPass, WholePass
from tokenbus.worker.engine.scheduling.step_budget import StepBudget


class Lengths:
    """An embedder whose rows are the lengths of the inputs; notes its batches."""

    width = 2
    max_input_tokens = 8
    vocab_size = 100

    def __init__(self, limits: BatchLimits) -> None:
        self.batch_limits = limits
        self.batches: list[list[int]] = []
        self.failure: Exception | None = None

    def tokenize(self, text: str) -> list[int]:
        return [1] * len(text)

    def describe(self) -> messages.CardEmbeddings:
        return messages.CardEmbeddings(dimensions=2, pooling="last", max_input_tokens=8)

    def begin(self, inputs: Listing[Listing[int]]) -> PoolingPass:
        return WholePass(self.pool, inputs)

    def pool(self, inputs: Listing[Listing[int]]) -> Matrix:
        self.batches.append([len(one) for one in inputs])
        if self.failure is not None:
            raise self.failure
        return np.array([[len(one), 3.0] for one in inputs], np.float32)


class Fixture:
    def __init__(self, limits: BatchLimits) -> None:
        self.embedder = Lengths(limits)
        self.results: dict[int, PoolingResult] = {}
        self.batches: list[list[int]] = []
        self.queue = PoolingQueue(self.batches.append, self.results.__setitem__, StepBudget(1.0, 1_000, 1_000))

    def add(self, call_id: int, *texts: str, now: float | None = None, normalize: bool = False) -> None:
        request = internal.Embed(inputs=list(texts), remaining_ms=60_000, normalize=normalize)
        moment = time.monotonic() if now is None else now
        self.queue.add(pooling.embed_job(call_id, request, self.embedder, moment))

    def run(self) -> None:
        while self.queue.has_work:
            self.queue.step(1.0)

    def lengths(self, call_id: int) -> list[float]:
        rows = np.frombuffer(self.results[call_id].rows, "<f4").reshape(-1, 2)
        return [float(row[0]) for row in rows]


def flat(max_tokens: int, max_inputs: int = 100) -> Fixture:
    return Fixture(BatchLimits(max_tokens, max_inputs, is_padded=False))


def test_inputs_of_several_requests_share_a_batch_and_return_to_their_own() -> None:
    one = flat(10)
    one.add(1, "aa", "a")
    one.add(2, "aaa")
    one.run()
    assert one.embedder.batches == [[2, 1, 3]]
    assert (one.lengths(1), one.lengths(2)) == ([2, 1], [3])
    assert (one.results[1].prompt_tokens, one.results[2].prompt_tokens) == (3, 3)


@pytest.mark.parametrize(("max_tokens", "batches"), [(6, [[3, 2, 1]]), (5, [[3, 2], [1]]), (1, [[3], [2], [1]])])
def test_a_batch_has_as_many_tokens_as_it_may_have_and_always_one_input(
    max_tokens: int, batches: list[list[int]]
) -> None:
    one = flat(max_tokens)
    one.add(1, "a", "aaa", "aa")
    one.run()
    assert one.embedder.batches == batches
    assert one.lengths(1) == [1, 3, 2]


@pytest.mark.parametrize(("max_tokens", "batches"), [(9, [[3, 2, 1]]), (8, [[3, 2], [1]])])
def test_padding_counts_where_there_is_padding(max_tokens: int, batches: list[list[int]]) -> None:
    one = Fixture(BatchLimits(max_tokens, 100, is_padded=True))
    one.add(1, "a", "aaa", "aa")
    one.run()
    assert one.embedder.batches == batches


def test_inputs_of_an_aborted_request_that_are_not_yet_computed_never_are() -> None:
    one = flat(100, max_inputs=1)
    one.add(1, "aaa", "aa", "a")
    one.add(2, "aaaa", "aaaaa")
    one.queue.step(1.0)
    one.queue.abort(1)
    one.queue.abort(99)
    one.run()
    assert one.embedder.batches == [[3], [5], [4]]
    assert list(one.results) == [2]
    one.queue.abort(2)
    assert not one.queue.has_work


def test_a_batch_has_no_more_inputs_than_it_may_have() -> None:
    one = flat(100, max_inputs=2)
    one.add(1, "a", "a")
    one.add(2, "a")
    one.run()
    assert one.embedder.batches == [[1, 1], [1]]


def test_a_request_waits_for_one_batch_of_a_larger_one_and_not_for_all_of_it() -> None:
    one = flat(4)
    one.add(1, *["aaaa"] * 5)
    one.add(2, "aa")
    one.queue.step(1.0)
    one.queue.step(1.0)
    assert one.embedder.batches == [[4], [2]]
    assert list(one.results) == [2]
    one.run()
    assert one.lengths(1) == [4] * 5


def test_requests_whose_time_is_over_end_before_anything_is_computed_for_them() -> None:
    one = flat(100)
    one.add(1, "a")
    one.add(2, "a", now=time.monotonic() - 61)
    one.queue.step(1.0)
    late = one.results[2].error
    assert late is not None
    assert late.code is errors.Code.DEADLINE_EXCEEDED
    assert one.embedder.batches == [[1]]
    assert one.results[1].error is None


def test_too_little_memory_ends_the_requests_in_the_batch_and_no_others() -> None:
    one = flat(2)
    one.add(1, "a", "a")
    one.add(2, "a")
    one.embedder.failure = InsufficientMemoryError()
    one.queue.step(1.0)
    one.embedder.failure = None
    one.run()
    error = one.results[1].error
    assert error is not None
    assert error.code is errors.Code.INSUFFICIENT_MEMORY
    assert one.lengths(2) == [1]


def test_rows_that_are_no_numbers_end_their_request_only() -> None:
    one = flat(100)
    one.add(1, "a")
    one.add(2, "aa", normalize=True)
    one.embedder.pool = lambda inputs: np.array(  # type: ignore[method-assign]
        [[np.nan, 1] if len(tokens) == 1 else [3, 4] for tokens in inputs], np.float32
    )
    one.run()
    error = one.results[1].error
    assert error is not None
    assert error.code is errors.Code.INTERNAL
    assert np.allclose(np.frombuffer(one.results[2].rows, "<f4"), [0.6, 0.8])


def test_inputs_whose_rows_are_no_numbers_are_computed_once_more_each_alone() -> None:
    one = flat(100)
    one.add(1, "aaa", "a")
    one.add(2, "aa", "aaaa")
    pool = one.embedder.pool

    def spread(inputs: Listing[Listing[int]]) -> Matrix:
        rows = pool(inputs)
        return rows * np.nan if any(len(tokens) == 3 for tokens in inputs) else rows

    one.embedder.pool = spread  # type: ignore[method-assign]
    one.run()
    assert one.embedder.batches[0] == [3, 1, 4, 2]
    assert sorted(one.embedder.batches[1:]) == [[1], [2], [3], [4]]
    error = one.results[1].error
    assert error is not None
    assert error.code is errors.Code.INTERNAL
    assert one.lengths(2) == [2, 4]
