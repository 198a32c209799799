"""Requests for embeddings share batches, take turns, and end by their own deadlines."""

import time
from collections.abc import Sequence as Listing

import numpy as np
import pytest

from tests.support.pieces import Lengths, PiecePass, Pieces
from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.contract.engine_errors import InsufficientMemoryError
from tokenbus.worker.engine.device import pooling
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.pooling import PoolingQueue, PoolingResult
from tokenbus.worker.engine.device.runner import BatchLimits
from tokenbus.worker.engine.scheduling.step_budget import StepBudget


class Fixture:
    def __init__(self, limits: BatchLimits, piece: int = 1_000, *, is_cut: bool = False) -> None:
        self.embedder = Pieces(limits) if is_cut else Lengths(limits)
        self.results: dict[int, PoolingResult] = {}
        self.batches: list[list[int]] = []
        self.is_alone = True
        self.queue = PoolingQueue(self.batches.append, self.results.__setitem__, StepBudget(1.0, piece, piece))

    def add(
        self, call_id: int, *texts: str, now: float | None = None, normalize: bool = False, tenant: str = ""
    ) -> None:
        request = internal.Embed(inputs=list(texts), remaining_ms=60_000, normalize=normalize, tenant=tenant)
        moment = time.monotonic() if now is None else now
        self.queue.add(pooling.embed_job(call_id, request, self.embedder, moment))

    def run(self) -> None:
        while self.queue.has_work:
            self.step()

    def step(self) -> None:
        self.queue.step(1.0, is_alone=self.is_alone)

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
    one.step()
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
    one.step()
    one.step()
    assert one.embedder.batches == [[4], [2]]
    assert list(one.results) == [2]
    one.run()
    assert one.lengths(1) == [4] * 5


def test_tenants_take_turns_however_many_requests_they_have() -> None:
    one = flat(4)
    for call_id in range(1, 6):
        one.add(call_id, "aaaa", tenant="many")
    one.add(6, "aaa", "aaa", tenant="few")
    one.add(7, "aa", "aa", "aa", tenant="third")
    one.run()
    assert [batch[0] for batch in one.embedder.batches[:5]] == [4, 3, 2, 4, 3]
    assert sorted(one.results) == [1, 2, 3, 4, 5, 6, 7]


def cut(piece: int, max_tokens: int = 8, max_inputs: int = 100) -> tuple[Fixture, Pieces]:
    one = Fixture(BatchLimits(max_tokens, max_inputs, is_padded=False), piece, is_cut=True)
    assert isinstance(one.embedder, Pieces)
    return one, one.embedder


def test_a_long_input_is_computed_piece_by_piece_and_each_piece_is_said_to_begin_and_end() -> None:
    one, embedder = cut(3)
    one.add(1, "aaaaaaaa")
    for _ in range(2):
        one.step()
    assert (embedder.pieces, one.results, one.batches) == ([3, 3], {}, [[1], [], [1], []])
    one.step()
    assert one.lengths(1) == [8]
    assert embedder.pieces == [3, 3, 2]
    assert not one.queue.has_work


def test_a_batch_holds_what_one_piece_is_likely_to_hold_unless_it_is_alone() -> None:
    for is_alone, batches, pieces in ((False, [[3, 2], [2, 1]], [5, 3]), (True, [[3, 2, 2, 1]], [5, 3])):
        one, embedder = cut(5)
        one.is_alone = is_alone
        one.add(1, "aaa", "aa", "aa", "a")
        one.run()
        assert (embedder.batches, embedder.pieces) == (batches, pieces)


def test_a_piece_is_as_large_as_the_time_allows() -> None:
    now = time.monotonic()
    one, embedder = cut(3)
    one.queue = PoolingQueue(one.batches.append, one.results.__setitem__, budget := StepBudget(1.0, 1, 100))
    budget.observe(100, 1.0)
    one.add(1, "aaaaaaaa", now=now)
    one.queue.step(0.02, is_alone=True)
    one.queue.step(0.0, is_alone=True)
    assert embedder.pieces[1] == 1
    one.run()
    assert one.lengths(1) == [8]


def test_a_request_that_ends_in_the_middle_of_its_input_takes_none_of_the_others_with_it() -> None:
    one, embedder = cut(4)
    one.is_alone = False
    one.add(1, "aaaaaaaa")
    one.add(2, "aa")
    one.step()
    one.queue.abort(1)
    one.run()
    assert list(one.results) == [2]
    assert embedder.pieces == [4, 2]


def test_a_request_whose_time_ends_in_the_middle_of_its_input_ends_there() -> None:
    one, embedder = cut(4)
    request = internal.Embed(inputs=["aaaaaaaa"], remaining_ms=60_000)
    job = pooling.embed_job(1, request, embedder, time.monotonic())
    one.queue.add(job)
    one.add(2, "aaa")
    one.step()
    job.deadline = 0.0
    one.run()
    late = one.results[1].error
    assert late is not None
    assert late.code is errors.Code.DEADLINE_EXCEEDED
    assert one.lengths(2) == [3]
    assert embedder.pieces == [4, 3]


def test_the_rest_of_a_batch_is_computed_when_one_of_its_requests_is_aborted() -> None:
    one, embedder = cut(4, max_tokens=8)
    budget = StepBudget(1.0, 8, 8)
    one.queue = PoolingQueue(one.batches.append, one.results.__setitem__, budget)
    one.add(1, "aaaa")
    one.add(2, "aaaa")
    embedder.begin = lambda inputs: Slow(embedder, inputs)  # type: ignore[method-assign]
    one.step()
    one.queue.abort(1)
    one.run()
    assert list(one.results) == [2]
    assert one.lengths(2) == [4]


class Slow(PiecePass):
    """Computes no more than half of what it may."""

    def advance(self, max_tokens: int) -> Matrix | None:
        return super().advance(max_tokens // 2)


def test_requests_whose_time_is_over_end_before_anything_is_computed_for_them() -> None:
    one = flat(100)
    one.add(1, "a")
    one.add(2, "a", now=time.monotonic() - 61)
    one.step()
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
    one.step()
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
