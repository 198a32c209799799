"""A generation makes outputs of tokens and exactly one terminal, whichever way it ends."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.protocol.wire import errors, messages
from tokenbus.worker import contract
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason
from tokenbus.worker.engine_client.generation import Generation
from tokenbus.worker.validator import StreamValidator

PIECES = [b"", b"a", b"b", b"ST", b"OP", b"\xe2\x82", b"\xac", b"c "]
EOS, A, B, ST, OP, HALF_EURO, REST_OF_EURO, C = range(8)
LENGTH, STOP, CANCELLED, ERROR = (
    messages.FinishReason.LENGTH,
    messages.FinishReason.STOP,
    messages.FinishReason.CANCELLED,
    messages.FinishReason.ERROR,
)


def made(
    token_id: int | None,
    end: EngineFinishReason | None = None,
    logprob: contract.Logprob | None = None,
    cached_tokens: int | None = None,
) -> ipc.SequenceOutput:
    return ipc.SequenceOutput(1, token_id, end, logprob, cached_tokens)


class Told:
    """A generation with everything its sink was told, checked against the contract on the way."""

    def __init__(self, *stop: str, max_tokens: int = 100, min_tokens: int = 0, logprobs: int | None = None) -> None:
        sampling = contract.Sampling(max_tokens=max_tokens, min_tokens=min_tokens, logprobs=logprobs)
        request = contract.EngineRequest(key="default:g", token_ids=[1, 2, 3], sampling=sampling, stop=stop)
        self.outputs: list[contract.Output] = []
        sink = StreamValidator(request, self.outputs.append)
        self.generation = Generation(request, sink, PIECES, accepted_at=10.0)

    def take(self, *token_ids: int, end: EngineFinishReason | None = None, now: float = 11.0) -> bool:
        """Gives it tokens, the last one with `end`; whether it ended with the last one."""
        for token_id in token_ids[:-1]:
            assert not self.generation.advance(made(token_id), now)
        return self.generation.advance(made(token_ids[-1], end), now)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def terminal(self) -> contract.Output:
        (terminal,) = [output for output in self.outputs if output.finish_reason is not None]
        assert terminal is self.outputs[-1]
        return terminal


def test_each_token_is_an_output_with_its_text() -> None:
    told = Told()
    assert not told.take(A, B)
    assert [(output.token_ids, output.text) for output in told.outputs] == [([A], "a"), ([B], "b")]


def test_the_last_token_by_length_is_in_the_terminal_with_all_held_text() -> None:
    told = Told("STOP", max_tokens=3)
    assert told.take(A, ST, HALF_EURO, end=EngineFinishReason.LENGTH)
    terminal = told.terminal
    assert (terminal.token_ids, terminal.text, terminal.finish_reason) == ([HALF_EURO], "ST\ufffd", LENGTH)
    assert told.text == "aST\ufffd"
    assert terminal.stop_match is None


def test_a_stop_token_is_counted_and_not_said_and_releases_what_was_held() -> None:
    told = Told("STOP")
    assert told.take(A, ST, B, ST, C, end=EngineFinishReason.STOP_TOKEN)
    terminal = told.terminal
    assert (terminal.token_ids, terminal.finish_reason, terminal.stop_match) == ([C], STOP, C)
    assert told.text == "aSTbST"
    assert terminal.usage == messages.Usage(prompt_tokens=3, completion_tokens=5, total_tokens=8, cached_tokens=0)


def test_a_stop_string_ends_it_before_the_engine_knows() -> None:
    told = Told("STOP")
    assert told.take(A, ST, OP)
    terminal = told.terminal
    assert (terminal.token_ids, terminal.finish_reason, terminal.stop_match) == ([OP], STOP, "STOP")
    assert told.text == "a"
    assert told.generation.finished_by is EngineFinishReason.STOP_TOKEN


def test_a_stop_string_in_the_last_token_is_a_stop_and_no_length() -> None:
    told = Told("STOP", max_tokens=2)
    assert told.take(ST, OP, end=EngineFinishReason.LENGTH)
    assert (told.terminal.finish_reason, told.terminal.stop_match, told.text) == (STOP, "STOP", "")


def test_a_stop_string_is_let_out_before_min_tokens_are_there() -> None:
    told = Told("STOP", min_tokens=2)
    assert not told.take(ST, OP, A)
    assert told.take(ST, OP)
    assert (told.text, told.terminal.stop_match) == ("STOPa", "STOP")


def test_a_character_split_over_tokens_is_said_whole() -> None:
    told = Told()
    told.take(HALF_EURO, REST_OF_EURO)
    assert [output.text for output in told.outputs] == ["", "€"]
    assert [output.token_ids for output in told.outputs] == [[HALF_EURO], [REST_OF_EURO]]


def test_a_cancel_releases_what_was_held_and_counts_what_was_sampled() -> None:
    told = Told("STOP")
    told.take(A, ST)
    told.generation.cancel(now=12.0)
    terminal = told.terminal
    assert (terminal.token_ids, terminal.text, terminal.finish_reason) == ([], "ST", CANCELLED)
    assert terminal.usage is not None
    assert terminal.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (EngineFinishReason.INSUFFICIENT_MEMORY, errors.Code.INSUFFICIENT_MEMORY),
        (EngineFinishReason.BAD_LOGITS, errors.Code.INTERNAL),
        (EngineFinishReason.ABORTED, errors.Code.INTERNAL),
    ],
)
def test_an_end_without_a_token_is_an_error_that_says_why(end: EngineFinishReason, code: errors.Code) -> None:
    told = Told()
    told.take(A)
    assert told.generation.advance(made(None, end), 12.0)
    assert told.terminal.finish_reason is ERROR
    assert told.terminal.error is not None
    assert told.terminal.error.code is code
    assert told.text == "a"


def test_a_generation_whose_engine_is_no_more_ends_in_that_error() -> None:
    told = Told()
    told.generation.fail(errors.Code.WORKER_LOST, now=12.0)
    assert told.terminal.error == errors.make_error(errors.Code.WORKER_LOST)
    assert told.terminal.usage == messages.Usage(prompt_tokens=3, completion_tokens=0, total_tokens=3, cached_tokens=0)


def test_a_second_terminal_is_impossible() -> None:
    told = Told()
    told.generation.cancel(now=12.0)
    with pytest.raises(AssertionError):
        told.generation.cancel(now=12.0)
    with pytest.raises(AssertionError):
        told.generation.fail(errors.Code.WORKER_LOST, now=12.0)
    assert len(told.outputs) == 1


def test_the_timings_are_the_distances_between_accept_start_first_token_and_end() -> None:
    told = Told()
    told.generation.started_at = 10.25
    told.take(A, now=11.0)
    told.take(B, now=12.0)
    told.generation.cancel(now=13.5)
    assert told.terminal.timings == messages.Timings(
        queue_ms=250.0, prefill_ms=750.0, ttft_ms=1_000.0, decode_ms=2_500.0, total_ms=3_500.0
    )


def test_all_the_time_of_one_that_never_started_was_spent_in_the_queue() -> None:
    told = Told()
    told.generation.cancel(now=10.5)
    assert told.terminal.timings == messages.Timings(
        queue_ms=500.0, prefill_ms=0.0, ttft_ms=500.0, decode_ms=0.0, total_ms=500.0
    )


def test_the_first_token_says_how_much_was_cached_and_the_terminal_tells_it() -> None:
    told = Told(max_tokens=2)
    told.generation.advance(made(A, cached_tokens=2), 11.0)
    told.generation.advance(made(B, EngineFinishReason.LENGTH), 11.0)
    assert told.terminal.usage == messages.Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5, cached_tokens=2)


def test_how_likely_a_token_was_comes_with_it_whichever_way_it_ends() -> None:
    first, last = contract.Logprob(A, -0.5, [(A, -0.5)]), contract.Logprob(B, -1.5, [(A, -0.25)])
    for end in (EngineFinishReason.LENGTH, EngineFinishReason.STOP_TOKEN):
        told = Told(max_tokens=2, logprobs=1)
        told.generation.advance(made(A, logprob=first), 11.0)
        assert told.generation.advance(made(B, end, logprob=last), 11.0)
        assert [output.logprobs for output in told.outputs] == [[first], [last]]
    told = Told("b", logprobs=1)
    assert told.generation.advance(made(B, logprob=last), 11.0)
    assert (told.terminal.stop_match, told.terminal.logprobs) == ("b", [last])


def test_how_far_a_prompt_is_is_handed_out_where_it_is_news() -> None:
    told = Told()
    for processed in (0, 0, 2, 2):
        told.generation.progress(processed, 1)
    assert [output.progress for output in told.outputs] == [
        messages.Progress(prompt_tokens=3, processed_tokens=0, cached_tokens=1),
        messages.Progress(prompt_tokens=3, processed_tokens=2, cached_tokens=1),
    ]
    assert all((output.token_ids, output.text, output.finish_reason) == ([], "", None) for output in told.outputs)


async def test_a_sink_that_fails_ends_its_own_generation_and_is_reported() -> None:
    def fail(output: contract.Output) -> None:
        raise ZeroDivisionError

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    request = contract.EngineRequest(key="default:g", token_ids=[1], sampling=contract.Sampling(max_tokens=9))
    generation = Generation(request, fail, PIECES, accepted_at=0.0)
    assert generation.advance(made(A), 1.0)
    assert [type(error) for error in reported] == [ZeroDivisionError]


def test_a_sink_that_cancels_its_own_generation_ends_it_with_the_token_it_was_given() -> None:
    told = Told()
    hear = told.outputs.append

    def cancel_at_once(output: contract.Output) -> None:
        hear(output)
        if output.finish_reason is None:
            generation.cancel(now=11.5)

    generation = Generation(told.generation.request, cancel_at_once, PIECES, accepted_at=10.0)
    assert generation.advance(made(A), 11.0)
    assert [output.finish_reason for output in told.outputs] == [None, CANCELLED]
    assert told.outputs[-1].usage is not None
    assert told.outputs[-1].usage.completion_tokens == 1


@given(
    token_ids=st.lists(st.sampled_from([A, B, ST, OP, HALF_EURO, REST_OF_EURO, C]), min_size=1, max_size=20),
    stops=st.lists(st.sampled_from(["STOP", "ab", "TO", "€", "c a"]), max_size=3, unique=True),
    by=st.sampled_from([EngineFinishReason.LENGTH, EngineFinishReason.STOP_TOKEN, CANCELLED]),
    min_tokens=st.integers(0, 3),
)
@settings(max_examples=200)
def test_every_sampled_token_is_in_exactly_one_output_and_no_text_is_lost(
    token_ids: list[int], stops: list[str], by: EngineFinishReason | messages.FinishReason, min_tokens: int
) -> None:
    least = min(min_tokens, len(token_ids) - 1)
    told = Told(*stops, max_tokens=len(token_ids), min_tokens=least)
    whole = b"".join(PIECES[token_id] for token_id in token_ids[: -1 if by is EngineFinishReason.STOP_TOKEN else None])
    for place, token_id in enumerate(token_ids, start=1):
        end = by if place == len(token_ids) and isinstance(by, EngineFinishReason) else None
        if told.generation.advance(made(token_id, end), 11.0):
            break
    else:
        told.generation.cancel(12.0)
    handed = [token_id for output in told.outputs for token_id in output.token_ids]
    assert handed == token_ids[: len(handed)]
    if isinstance(told.terminal.stop_match, str):
        assert told.terminal.stop_match in stops
        assert (told.text + told.terminal.stop_match) in whole.decode(errors="replace")
    else:
        assert told.text == whole.decode(errors="replace")
        assert handed == token_ids
