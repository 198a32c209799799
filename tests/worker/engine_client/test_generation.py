"""A generation makes outputs of tokens and exactly one terminal, whichever way it ends."""

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.contract.contract import StreamValidator
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason
from tokenbus.worker.engine_client.generation import Generation
from tokenbus.worker.engine_client.reader import CompletionReader

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
    logprob: engine_output.Logprob | None = None,
    cached_tokens: int | None = None,
) -> ipc.SequenceOutput:
    return ipc.SequenceOutput(
        1, [] if token_id is None else [token_id], end, [] if logprob is None else [logprob], cached_tokens
    )


class Recording:
    """A generation with everything its sink was told, checked against the contract on the way."""

    def __init__(
        self,
        *stop: str,
        max_tokens: int = 100,
        min_tokens: int = 0,
        logprobs: int | None = None,
        return_progress: bool = False,
    ) -> None:
        sampling = engine_request.Sampling(max_tokens=max_tokens, min_tokens=min_tokens, logprobs=logprobs)
        request = engine_request.EngineRequest(
            key="default:g", token_ids=[1, 2, 3], sampling=sampling, stop=stop, return_progress=return_progress
        )
        self.outputs: list[engine_output.Output] = []
        sink = StreamValidator(request, self.outputs.append)
        self.generation = Generation(request, sink, CompletionReader(request, PIECES), accepted_at=10.0)

    def take(self, *token_ids: int, end: EngineFinishReason | None = None, now: float = 11.0) -> bool:
        """Gives it tokens, the last one with `end`; whether it ended with the last one."""
        for token_id in token_ids[:-1]:
            assert not self.generation.advance(made(token_id), now)
        return self.generation.advance(made(token_ids[-1], end), now)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def terminal(self) -> engine_output.Output:
        (terminal,) = [output for output in self.outputs if output.finish_reason is not None]
        assert terminal is self.outputs[-1]
        return terminal


def test_each_token_is_an_output_with_its_text() -> None:
    recording = Recording()
    assert not recording.take(A, B)
    assert [(output.token_ids, output.text) for output in recording.outputs] == [([A], "a"), ([B], "b")]


def test_the_last_token_by_length_is_in_the_terminal_with_all_held_back_text() -> None:
    recording = Recording("STOP", max_tokens=3)
    assert recording.take(A, ST, HALF_EURO, end=EngineFinishReason.LENGTH)
    terminal = recording.terminal
    assert (terminal.token_ids, terminal.text, terminal.finish_reason) == ([HALF_EURO], "ST\ufffd", LENGTH)
    assert recording.text == "aST\ufffd"
    assert terminal.stop_match is None


def test_a_stop_token_counts_adds_no_text_and_releases_held_back_text() -> None:
    recording = Recording("STOP")
    assert recording.take(A, ST, B, ST, C, end=EngineFinishReason.STOP_TOKEN)
    terminal = recording.terminal
    assert (terminal.token_ids, terminal.finish_reason, terminal.stop_match) == ([C], STOP, C)
    assert recording.text == "aSTbST"
    assert terminal.usage == messages.Usage(prompt_tokens=3, completion_tokens=5, total_tokens=8, cached_tokens=0)


def test_a_stop_string_ends_it_before_the_engine_knows() -> None:
    recording = Recording("STOP")
    assert recording.take(A, ST, OP)
    terminal = recording.terminal
    assert (terminal.token_ids, terminal.finish_reason, terminal.stop_match) == ([OP], STOP, "STOP")
    assert recording.text == "a"
    assert recording.generation.is_complete


def test_a_stop_string_in_the_last_token_is_a_stop_not_a_length() -> None:
    recording = Recording("STOP", max_tokens=2)
    assert recording.take(ST, OP, end=EngineFinishReason.LENGTH)
    assert (recording.terminal.finish_reason, recording.terminal.stop_match, recording.text) == (STOP, "STOP", "")


def test_a_stop_string_within_min_tokens_is_text() -> None:
    recording = Recording("STOP", min_tokens=2)
    assert not recording.take(ST, OP, A)
    assert recording.take(ST, OP)
    assert (recording.text, recording.terminal.stop_match) == ("STOPa", "STOP")


def test_a_character_split_over_tokens_comes_out_whole() -> None:
    recording = Recording()
    recording.take(HALF_EURO, REST_OF_EURO)
    assert [output.text for output in recording.outputs] == ["", "€"]
    assert [output.token_ids for output in recording.outputs] == [[HALF_EURO], [REST_OF_EURO]]


def test_a_cancel_releases_held_back_text_and_counts_sampled_tokens() -> None:
    recording = Recording("STOP")
    recording.take(A, ST)
    recording.generation.cancel(now=12.0)
    terminal = recording.terminal
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
def test_an_end_without_a_token_is_an_error_with_its_reason(end: EngineFinishReason, code: errors.Code) -> None:
    recording = Recording()
    recording.take(A)
    assert recording.generation.advance(made(None, end), 12.0)
    assert recording.terminal.finish_reason is ERROR
    assert recording.terminal.error is not None
    assert recording.terminal.error.code is code
    assert recording.text == "a"


def test_a_generation_whose_engine_is_gone_ends_in_the_given_error() -> None:
    recording = Recording()
    recording.generation.fail(errors.make_error(errors.Code.WORKER_LOST), now=12.0)
    assert recording.terminal.error == errors.make_error(errors.Code.WORKER_LOST)
    assert recording.terminal.usage == messages.Usage(
        prompt_tokens=3, completion_tokens=0, total_tokens=3, cached_tokens=0
    )


def test_a_second_terminal_is_impossible() -> None:
    recording = Recording()
    recording.generation.cancel(now=12.0)
    with pytest.raises(AssertionError):
        recording.generation.cancel(now=12.0)
    with pytest.raises(AssertionError):
        recording.generation.fail(errors.make_error(errors.Code.WORKER_LOST), now=12.0)
    assert len(recording.outputs) == 1


def test_the_timings_are_the_distances_between_accept_start_first_token_and_end() -> None:
    recording = Recording()
    recording.generation.started_at = 10.25
    recording.take(A, now=11.0)
    recording.take(B, now=12.0)
    recording.generation.cancel(now=13.5)
    assert recording.terminal.timings == messages.Timings(
        queue_ms=250.0, prefill_ms=750.0, ttft_ms=1_000.0, decode_ms=2_500.0, total_ms=3_500.0
    )


def test_all_the_time_of_one_that_never_started_was_spent_in_the_queue() -> None:
    recording = Recording()
    recording.generation.cancel(now=10.5)
    assert recording.terminal.timings == messages.Timings(
        queue_ms=500.0, prefill_ms=0.0, ttft_ms=500.0, decode_ms=0.0, total_ms=500.0
    )


def test_the_terminal_counts_the_cached_tokens_that_the_first_token_reported() -> None:
    recording = Recording(max_tokens=2)
    recording.generation.advance(made(A, cached_tokens=2), 11.0)
    recording.generation.advance(made(B, EngineFinishReason.LENGTH), 11.0)
    assert recording.terminal.usage == messages.Usage(
        prompt_tokens=3, completion_tokens=2, total_tokens=5, cached_tokens=2
    )


def test_log_probabilities_come_with_their_token_however_it_ends() -> None:
    first, last = engine_output.Logprob(A, -0.5, [(A, -0.5)]), engine_output.Logprob(B, -1.5, [(A, -0.25)])
    for end in (EngineFinishReason.LENGTH, EngineFinishReason.STOP_TOKEN):
        recording = Recording(max_tokens=2, logprobs=1)
        recording.generation.advance(made(A, logprob=first), 11.0)
        assert recording.generation.advance(made(B, end, logprob=last), 11.0)
        assert [output.logprobs for output in recording.outputs] == [[first], [last]]
    recording = Recording("b", logprobs=1)
    assert recording.generation.advance(made(B, logprob=last), 11.0)
    assert (recording.terminal.stop_match, recording.terminal.logprobs) == ("b", [last])


def test_progress_is_handed_out_only_when_it_changes() -> None:
    recording = Recording(return_progress=True)
    for processed in (0, 0, 2, 2):
        recording.generation.progress(processed, 1)
    assert [output.progress for output in recording.outputs] == [
        messages.Progress(prompt_tokens=3, processed_tokens=0, cached_tokens=1),
        messages.Progress(prompt_tokens=3, processed_tokens=2, cached_tokens=1),
    ]
    assert all((output.token_ids, output.text, output.finish_reason) == ([], "", None) for output in recording.outputs)


async def test_a_sink_that_fails_ends_its_own_generation_and_is_reported() -> None:
    def fail(output: engine_output.Output) -> None:
        raise ZeroDivisionError

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    request = engine_request.EngineRequest(
        key="default:g", token_ids=[1], sampling=engine_request.Sampling(max_tokens=9)
    )
    generation = Generation(request, fail, CompletionReader(request, PIECES), accepted_at=0.0)
    assert generation.advance(made(A), 1.0)
    assert [type(error) for error in reported] == [ZeroDivisionError]


def test_a_sink_that_cancels_its_own_generation_ends_it_with_that_token() -> None:
    recording = Recording()
    hear = recording.outputs.append

    def cancel_at_once(output: engine_output.Output) -> None:
        hear(output)
        if output.finish_reason is None:
            generation.cancel(now=11.5)

    request = recording.generation.request
    generation = Generation(request, cancel_at_once, CompletionReader(request, PIECES), accepted_at=10.0)
    assert generation.advance(made(A), 11.0)
    assert [output.finish_reason for output in recording.outputs] == [None, CANCELLED]
    assert recording.outputs[-1].usage is not None
    assert recording.outputs[-1].usage.completion_tokens == 1


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
    recording = Recording(*stops, max_tokens=len(token_ids), min_tokens=least)
    whole = b"".join(PIECES[token_id] for token_id in token_ids[: -1 if by is EngineFinishReason.STOP_TOKEN else None])
    for place, token_id in enumerate(token_ids, start=1):
        end = by if place == len(token_ids) and isinstance(by, EngineFinishReason) else None
        if recording.generation.advance(made(token_id, end), 11.0):
            break
    else:
        recording.generation.cancel(12.0)
    handed = [token_id for output in recording.outputs for token_id in output.token_ids]
    assert handed == token_ids[: len(handed)]
    if isinstance(recording.terminal.stop_match, str):
        assert recording.terminal.stop_match in stops
        assert (recording.text + recording.terminal.stop_match) in whole.decode(errors="replace")
    else:
        assert recording.text == whole.decode(errors="replace")
        assert handed == token_ids


# Several tokens in one step


def made_together(*token_ids: int, end: EngineFinishReason | None = None) -> ipc.SequenceOutput:
    return ipc.SequenceOutput(1, list(token_ids), end)


def test_tokens_of_one_step_are_one_output() -> None:
    recording = Recording()
    assert not recording.generation.advance(made_together(A, B, C), 11.0)
    assert [(output.token_ids, output.text) for output in recording.outputs] == [([A, B, C], "abc ")]
    assert list(recording.generation.sampled) == [A, B, C]
    assert recording.outputs[0].first_token is not None


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    recording = Recording("STOP")
    assert recording.generation.advance(made_together(A, ST, OP, B, end=EngineFinishReason.LENGTH), 11.0)
    terminal = recording.terminal
    assert (terminal.token_ids, terminal.text, terminal.stop_match) == ([A, ST, OP], "a", "STOP")
    assert terminal.usage is not None
    assert terminal.usage.completion_tokens == 3


def test_the_last_of_several_tokens_may_end_it() -> None:
    stopped = Recording()
    assert stopped.generation.advance(made_together(A, B, EOS, end=EngineFinishReason.STOP_TOKEN), 11.0)
    assert (stopped.terminal.token_ids, stopped.text, stopped.terminal.stop_match) == ([A, B, EOS], "ab", EOS)
    full = Recording(max_tokens=2)
    assert full.generation.advance(made_together(A, HALF_EURO, end=EngineFinishReason.LENGTH), 11.0)
    assert (full.text, full.terminal.finish_reason) == ("a\ufffd", LENGTH)


# Constraints


def constrained() -> Recording:
    recording = Recording()
    constraint = engine_request.Constraint(kind=engine_request.ConstraintKind.REGEX, source="a+", param="regex")
    recording.generation.request = msgspec.structs.replace(recording.generation.request, constraint=constraint)
    return recording


def test_a_compiled_constraint_is_news_once() -> None:
    recording = constrained()
    recording.generation.constraint_ready()
    (output,) = recording.outputs
    assert (output.is_constraint_ready, output.token_ids) == (True, [])
    recording.take(A)
    recording.generation.constraint_ready()
    assert len(recording.outputs) == 2


def test_a_constraint_that_is_given_up_is_an_error_that_names_its_field() -> None:
    recording = constrained()
    recording.take(A)
    assert recording.generation.advance(made(None, EngineFinishReason.CONSTRAINT_FAILED), 11.0)
    error = recording.terminal.error
    assert error is not None
    assert (error.code, error.param) == (errors.Code.INVALID_REQUEST, "regex")


def test_progress_is_handed_out_only_to_who_wants_to_know() -> None:
    recording = Recording()
    recording.generation.progress(2, 1)
    assert recording.outputs == []
