"""Statistics of a benchmark from the chunks of its requests."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest

from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, messages
from tokenbus.protocol.wire.messages import FinishReason
from tokenbus.replay.load.points import LoadKind, LoadPoint
from tokenbus.replay.load.results import RunResult, summarize
from tokenbus.replay.load.sender import Sender
from tokenbus.replay.load.stats import OTHERS, RunStats, retry_delay_s
from tokenbus.replay.load.table import progress, run_lines

USAGE = messages.Usage(prompt_tokens=10, completion_tokens=4, total_tokens=14, cached_tokens=8)
TIMINGS = messages.Timings(queue_ms=3.0, prefill_ms=1.0, ttft_ms=4.0, decode_ms=2.0, total_ms=6.0)


def chunk(tokens: int = 0, **fields: object) -> messages.Chunk:
    return messages.Chunk(id="r", tokens=tokens, **fields)  # type: ignore[arg-type]


def end(reason: FinishReason = FinishReason.LENGTH, worker: str = "w") -> messages.Chunk:
    return chunk(finish_reason=reason, worker_id=worker, usage=USAGE, timings=TIMINGS)


def refusal(code: errors.Code = errors.Code.OVERLOADED, message: str = "full") -> messages.Chunk:
    return chunk(finish_reason=FinishReason.ERROR, error=errors.make_error(code, message))


def run_of(stats: RunStats, *, interrupted: bool = False) -> RunResult:
    return summarize(LoadPoint(LoadKind.CONCURRENCY, 1.0), stats, interrupted=interrupted)


def test_times_count_from_when_a_request_was_due() -> None:
    stats = RunStats(0.0)
    timer = stats.start_request(due_at=1.0, now=1.5)
    timer.receive(chunk(worker_id=None), 1.6)
    timer.receive(chunk(worker_id="w"), 2.0)
    timer.receive(chunk(1), 3.0)
    timer.receive(chunk(1), 3.5)
    timer.receive(end(), 4.0)
    run = run_of(stats)
    spreads = (run.late_ms, run.accept_ms, run.ttft_ms, run.itl_ms, run.e2e_ms, run.queue_ms)
    assert [spread.max for spread in spreads] == [500, 1_000, 2_000, 500, 3_000, 3]


def test_the_time_per_output_token_is_that_after_the_first_by_the_tokens_after_it() -> None:
    stats = RunStats(0.0)
    timer = stats.start_request(0.0, 0.0)
    for at, tokens in ((1.0, 1), (1.4, 4), (1.5, 0), (2.0, 1)):
        timer.receive(chunk(tokens), at)
    timer.receive(end(), 2.1)
    run = run_of(stats)
    assert (run.output_tokens, run.tpot_ms.mean, run.tpot_ms.max) == (6, 200, 200)


def test_inter_token_latency_is_the_time_between_arrivals_however_many_tokens_and_chunks_each_has() -> None:
    stats = RunStats(0.0)
    timer = stats.start_request(0.0, 0.0)
    for at, tokens in ((1.0, 1), (1.4, 4), (1.4, 1), (1.5, 0), (2.0, 1), (2.0, 1)):
        timer.receive(chunk(tokens), at)
    timer.receive(end(), 2.1)
    run = run_of(stats)
    assert (stats.times["itl_ms"].count, run.itl_ms.max) == (2, 600)
    assert run.itl_ms.p50 == pytest.approx(400, rel=0.005)
    assert (run.output_tokens, run.tokens_per_arrival) == (8, round(8 / 3, 3))
    assert "arrivals    2.67 tokens each; ITL is the time between them" in run_lines(run)


def test_tokens_that_all_arrive_at_once_have_no_time_per_token() -> None:
    stats = RunStats(0.0)
    timer = stats.start_request(0.0, 0.0)
    for tokens in (3, 1):
        timer.receive(chunk(tokens), 1.0)
    timer.receive(end(), 1.0)
    run = run_of(stats)
    assert (run.ttft_ms.max, run.tpot_ms.max, run.itl_ms.max, run.tokens_per_arrival) == (1_000, None, None, 4)


class Bursts:
    """A stream that gives some chunks at once, then makes its reader wait, again and again."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    async def __aenter__(self) -> "Bursts":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> AsyncIterator[messages.Chunk]:
        for size in self._sizes:
            await asyncio.sleep(0)
            for _ in range(size):
                yield chunk(1)
        yield end()


async def test_what_a_reader_does_not_wait_for_is_one_arrival() -> None:
    stats = RunStats(time.monotonic())
    sender = Sender(cast(WireClient, None), "m", stats)
    for _ in range(2):
        await sender.read(cast(ChunkStream, Bursts(3, 1, 4)), stats.start_request(stats.began_at, stats.began_at))
    assert (stats.output_tokens, stats.arrivals, stats.times["itl_ms"].count) == (16, 6, 4)


def test_an_answer_of_one_token_has_no_gaps() -> None:
    stats = RunStats(0.0)
    timer = stats.start_request(0.0, 0.0)
    timer.receive(chunk(1), 1.0)
    timer.receive(end(), 2.0)
    run = run_of(stats)
    assert (run.ttft_ms.max, run.itl_ms.max, run.tpot_ms.max) == (1_000, None, None)


def test_failed_and_cancelled_requests_have_no_end_to_end_time_but_their_tokens_count() -> None:
    stats = RunStats(0.0)
    for terminal in (refusal(), end(FinishReason.CANCELLED)):
        timer = stats.start_request(0.0, 0.0)
        timer.receive(chunk(2), 1.0)
        timer.receive(terminal, 2.0)
    run = run_of(stats)
    assert (run.sent, run.finished, run.failed, run.cancelled) == (2, 0, 1, 1)
    assert run.e2e_ms.max is None
    assert (run.output_tokens, run.output_tokens_per_s, run.requests_per_s) == (4, 2.0, 0.0)


def test_errors_are_counted_by_code_with_the_first_message_of_each() -> None:
    stats = RunStats(0.0)
    for terminal in (refusal(message="first"), refusal(message="second"), refusal(errors.Code.NO_WORKER, "none")):
        stats.start_request(0.0, 0.0).receive(terminal, 1.0)
    run = run_of(stats)
    assert run.errors == {"no_worker": 1, "overloaded": 2}
    assert run.error_examples == {"no_worker": "none", "overloaded": "first"}
    assert run.finish_reasons == {"error": 3}


def test_requests_are_counted_by_worker_and_cached_tokens_by_prompt() -> None:
    stats = RunStats(0.0)
    for worker in ("b", "a", "b"):
        stats.start_request(0.0, 0.0).receive(end(worker=worker), 1.0)
    run = run_of(stats)
    assert run.workers == {"a": 1, "b": 2}
    assert (run.prompt_tokens, run.cached_tokens, run.cached_share) == (30, 24, 0.8)


def test_the_number_of_workers_that_are_counted_apart_is_bounded() -> None:
    stats = RunStats(0.0)
    for number in range(1_026):
        stats.start_request(0.0, 0.0).receive(end(worker=f"w{number}"), 1.0)
    assert (len(stats.workers), stats.workers[OTHERS]) == (1_025, 2)


def test_requests_in_flight_at_an_interrupt_count_as_cancelled() -> None:
    stats = RunStats(0.0)
    watches = [stats.start_request(0.0, 0.0) for _ in range(3)]
    watches[0].receive(end(), 1.0)
    run = run_of(stats, interrupted=True)
    assert (run.sent, run.finished, run.cancelled, run.peak_in_flight) == (3, 1, 2, 3)
    assert "interrupted 2 cancelled" in run_lines(run)


def test_a_run_lasts_until_its_last_chunk() -> None:
    stats = RunStats(10.0)
    stats.start_request(10.0, 10.0).receive(end(), 12.0)
    run = run_of(stats)
    assert (run.duration_s, run.requests_per_s) == (2.0, 0.5)


def test_a_run_without_requests_has_no_numbers() -> None:
    run = run_of(RunStats(10.0))
    assert (run.sent, run.requests_per_s, run.cached_share) == (0, 0.0, None)
    assert "ended by    nothing" in run_lines(run)


def test_requests_that_were_not_sent_or_late_are_reported() -> None:
    stats = RunStats(0.0)
    stats.start_request(0.0, 0.05).receive(end(), 1.0)
    stats.not_sent = 7
    lines = "\n".join(run_lines(run_of(stats)))
    assert "not sent    7: --max-in-flight" in lines
    assert "the benchmark itself was late" in lines


def test_progress_is_one_line() -> None:
    stats = RunStats(0.0)
    assert progress(stats, None, None, 0.0) == "0 done, 0 in flight, 0 tokens/s, 0 s"
    stats.start_request(0.0, 0.0)
    stats.start_request(0.0, 0.0).receive(refusal(), 1.0)
    stats.output_tokens, stats.not_sent = 300, 2
    assert progress(stats, 9, 60, 2.0) == "3/9 done, 1 in flight, 150 tokens/s, 2/60 s, 1 failed, 2 not sent"


@pytest.mark.parametrize(("told_ms", "waits_s"), [(None, 0.1), (5, 0.1), (400, 0.4), (60_000, 1.0)])
def test_a_client_pauses_after_an_error_as_long_as_it_says_within_bounds(told_ms: float | None, waits_s: float) -> None:
    assert retry_delay_s(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=told_ms)) == waits_s
