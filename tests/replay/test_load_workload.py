"""Requests of a benchmark and their arrival times."""

import itertools
import random

import pytest

from tokenbus.protocol.wire import messages
from tokenbus.replay.load.points import LoadKind, LoadPoint, poisson, schedule
from tokenbus.replay.load.workload import RandomTokens, RepeatedText, TraceWorkload, Workload, clipped
from tokenbus.replay.traces import TracedRequest

COMMON = messages.GenerateRequest(temperature=0.0, timeout_ms=5.0, cache_salt="s")


def traced(at_s: float, prompt_tokens: int, output_tokens: int = 10, ids: tuple[int, ...] = (1, 2, 3)) -> TracedRequest:
    return TracedRequest(at_s, prompt_tokens, output_tokens, ids, block_tokens=16)


def trace(*requests: TracedRequest) -> TraceWorkload:
    return TraceWorkload("t", requests, 400)


def first(workload: Workload, count: int, seed: str = "0") -> list[messages.GenerateRequest]:
    return [ask.request for ask in itertools.islice(workload.generate(COMMON, seed), count)]


def test_random_prompts_have_their_length_and_stay_below_the_vocabulary() -> None:
    for request in first(RandomTokens(500, 7, 16), 3):
        assert request.token_ids is not None
        assert len(request.token_ids) == 500
        assert set(request.token_ids) == set(range(1, 16))
        assert (request.max_tokens, request.ignore_eos) == (7, True)


def test_random_prompts_repeat_with_their_seed_alone() -> None:
    workload = RandomTokens(20, 1, 400)
    assert first(workload, 3, "0 1") == first(workload, 3, "0 1")
    prompts = first(workload, 3, "0 1") + first(workload, 3, "0 2")
    assert len({tuple(request.token_ids or ()) for request in prompts}) == 6


@pytest.mark.parametrize("workload", [RandomTokens(2, 1, 400), RepeatedText("hello", None), trace(traced(0, 48))])
def test_every_request_has_the_common_fields(workload: Workload) -> None:
    (request,) = first(workload, 1)
    assert (request.temperature, request.timeout_ms, request.cache_salt) == (0.0, 5.0, "s")


def test_a_text_is_sent_through_the_chat_template_without_a_length() -> None:
    (request,) = first(RepeatedText("hello", None), 1)
    assert request.messages == [messages.ChatMessage(role="user", content="hello")]
    assert (request.max_tokens, request.ignore_eos) == (None, None)


def test_prompts_have_the_common_prefixes_of_the_trace() -> None:
    one, other = first(trace(traced(0, 40), traced(1, 48, ids=(1, 2, 4))), 2)
    assert one.token_ids is not None
    assert other.token_ids is not None
    assert (len(one.token_ids), len(other.token_ids)) == (40, 48)
    assert one.token_ids[:32] == other.token_ids[:32]
    assert one.token_ids[32:34] != other.token_ids[32:34]


def test_random_tokens_that_do_not_fit_the_context_are_refused() -> None:
    assert RandomTokens(90, 10, 400).fit(100, clip=False).skipped == 0
    with pytest.raises(ValueError, match="do not fit the model's context of 99 tokens"):
        RandomTokens(90, 10, 400).fit(99, clip=False)


def test_requests_of_a_trace_that_do_not_fit_are_skipped_and_counted() -> None:
    fitted = trace(traced(0, 38), traced(1, 39), traced(2, 30)).fit(48, clip=False)
    assert fitted.skipped == 1
    assert fitted.workload.num_requests == 2
    with pytest.raises(ValueError, match=r"none of the 1 requests of t fits .* --clip cuts them"):
        trace(traced(0, 39)).fit(48, clip=False)


def test_requests_of_a_trace_that_do_not_fit_can_be_clipped_and_are_counted() -> None:
    fitted = trace(traced(0, 38), traced(1, 39)).fit(48, clip=True)
    assert (fitted.skipped, fitted.clipped) == (0, 1)
    assert [len(request.token_ids or ()) for request in first(fitted.workload, 2)] == [38, 38]


@pytest.mark.parametrize(
    ("prompt", "output", "kept"),
    [(38, 10, (38, 10)), (39, 10, (38, 10)), (16, 100, (16, 24)), (100, 100, (24, 24)), (1, 48, (1, 24))],
)
def test_an_answer_keeps_at_most_half_of_the_context_and_the_prompt_the_rest(
    prompt: int, output: int, kept: tuple[int, int]
) -> None:
    cut = clipped(traced(0, prompt, output, tuple(range(-(-prompt // 16)))), 48)
    assert (cut.prompt_tokens, cut.output_tokens) == kept
    assert len(cut.hash_ids) == -(-cut.prompt_tokens // 16)


def test_poisson_arrivals_come_at_their_rate_and_repeat_with_their_seed() -> None:
    times = list(itertools.islice(poisson(5.0, 1, random.Random(1)), 10_000))
    assert times == list(itertools.islice(poisson(5.0, 1, random.Random(1)), 10_000))
    assert times == sorted(times)
    assert 10_000 / times[-1] == pytest.approx(5.0, rel=0.03)


def test_bursts_arrive_together_at_the_same_overall_rate() -> None:
    times = list(itertools.islice(poisson(5.0, 4, random.Random(1)), 10_000))
    assert all(len(set(times[place : place + 4])) == 1 for place in range(0, 10_000, 4))
    assert len(set(times)) == 2_500
    assert 10_000 / times[-1] == pytest.approx(5.0, rel=0.06)


def test_a_trace_starts_with_its_first_request_and_can_be_sped_up() -> None:
    asks = trace(traced(100, 48), traced(104, 48)).generate(COMMON, "0")
    assert [ask.at_s for ask in schedule(asks, LoadPoint(LoadKind.SPEEDUP, 2.0), 1, random.Random(0))] == [0.0, 2.0]


def test_a_trace_that_is_sent_at_a_rate_ends_with_its_last_request() -> None:
    asks = trace(traced(100, 48), traced(100, 48)).generate(COMMON, "0")
    times = [ask.at_s for ask in schedule(asks, LoadPoint(LoadKind.RATE, 2.0), 1, random.Random(0))]
    assert times == list(itertools.islice(poisson(2.0, 1, random.Random(0)), 2))
