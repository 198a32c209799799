"""A generation that continues a completion goes on as if it had sampled all of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.contract.contract import StreamValidator
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.sequence import FinishRule
from tokenbus.worker.engine_client import generation, reader
from tokenbus.worker.engine_client.generation import Generation
from tokenbus.worker.engine_client.reader import CompletionReader

PIECES = [b"", b"a", b"b", b"ST", b"OP", b"\xe2\x82", b"\xac", b"c "]
EOS, A, B, ST, OP, HALF_EURO, REST_OF_EURO, C = range(8)
FIRST = engine_output.FirstTokenStats(cached_tokens=2, queue_ms=250.0, prefill_ms=750.0)


class Engine:
    """Feeds a generation with tokens as an engine would, and keeps its outputs."""

    def __init__(self, *stop: str, resumed: engine_request.ResumedCompletion | None = None, **sampling: object) -> None:
        fields: dict[str, object] = {"max_tokens": 100} | sampling
        request = engine_request.EngineRequest(
            key="default:g",
            token_ids=[1, 2, 3],
            sampling=engine_request.Sampling(**fields),  # type: ignore[arg-type]
            stop=stop,
            resumed=resumed,
        )
        self.outputs: list[engine_output.Output] = []
        self.rule = FinishRule(request.sampling, [EOS])
        sink = StreamValidator(request, self.outputs.append)
        self.generation = Generation(request, sink, CompletionReader(request, PIECES), accepted_at=10.0)
        self.generation.resume([EOS])
        self.generation.started_at = 10.25

    def sample(self, *token_ids: int) -> None:
        """Samples tokens until the generation ends; if it ended with the given ones, it is told so."""
        if self.generation.is_complete:
            self.generation.end_resumed(12.0)
        for place, token_id in enumerate(token_ids, start=len(self.generation.sampled)):
            if self.outputs and self.outputs[-1].finish_reason is not None:
                return
            end = self.rule.finish_reason(token_id, place + 1)
            self.generation.advance(ipc.SequenceOutput(1, [token_id], end, [], 0 if place else 2), 11.0)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def texts(self) -> list[str]:
        """The text that came with each token."""
        with_tokens = [output for output in self.outputs if output.token_ids]
        return [text for output in with_tokens for text in output.resumed_texts or [output.text]]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def terminal(self) -> engine_output.Output:
        return self.outputs[-1]


def after(*token_ids: int, **fields: object) -> engine_request.ResumedCompletion:
    given: dict[str, object] = {"cached_tokens": 2, "queue_ms": 250.0, "prefill_ms": 750.0, "elapsed_ms": 500.0}
    return engine_request.ResumedCompletion(token_ids=list(token_ids), **(given | fields))  # type: ignore[arg-type]


@given(
    token_ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=20),
    stops=st.lists(st.sampled_from(["STOP", "ab", "TO", "€", "c a"]), max_size=3, unique=True),
    stop_token_ids=st.sets(st.sampled_from([A, C]), max_size=2),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 3),
    max_tokens=st.integers(1, 20),
    data=st.data(),
)
@settings(max_examples=300)
def test_a_completion_continued_at_any_place_is_the_undisturbed_one(
    token_ids: list[int],
    stops: list[str],
    stop_token_ids: set[int],
    ignore_eos: bool,
    min_tokens: int,
    max_tokens: int,
    data: st.DataObject,
) -> None:
    sampling = {
        "max_tokens": max(max_tokens, min_tokens + 1),
        "min_tokens": min_tokens,
        "stop_token_ids": tuple(stop_token_ids),
        "ignore_eos": ignore_eos,
    }
    whole = Engine(*stops, **sampling)
    whole.sample(*token_ids)
    count = data.draw(st.integers(1, len(whole.token_ids)))
    again = Engine(*stops, resumed=after(*whole.token_ids[:count]), **sampling)
    assert [output.is_resumed for output in again.outputs] == [True]
    again.sample(*token_ids[count:])
    if whole.terminal.finish_reason is None:
        whole.generation.cancel(12.0)
        again.generation.cancel(12.0)
    assert again.token_ids == whole.token_ids
    assert again.text == whole.text
    # each token has the same text, but that what is held back until the last one may come behind it
    assert again.texts[:-1] == whole.texts[:-1]
    assert (again.terminal.finish_reason, again.terminal.stop_match) == (
        whole.terminal.finish_reason,
        whole.terminal.stop_match,
    )
    assert again.terminal.usage == whole.terminal.usage


def test_held_back_text_comes_out_after_the_given_tokens() -> None:
    one = Engine("STOP", resumed=after(A, ST))
    assert one.text == "a"
    one.sample(B)
    assert one.outputs[-1].text == "STb"
    half = Engine(resumed=after(HALF_EURO))
    assert half.text == ""
    half.sample(REST_OF_EURO)
    assert half.text == "€"


def test_a_stop_string_may_begin_among_the_given_tokens() -> None:
    one = Engine("STOP", resumed=after(A, ST))
    one.sample(OP)
    assert (one.text, one.terminal.stop_match, one.terminal.token_ids) == ("a", "STOP", [OP])


@pytest.mark.parametrize(
    ("given", "stop", "sampling", "text", "match"),
    [
        ((A, B), "never", {"max_tokens": 2}, "ab", None),
        ((A, ST), "STOP", {"max_tokens": 2}, "aST", None),
        ((A, EOS), "never", {}, "a", EOS),
        ((ST, C), "STOP", {"stop_token_ids": (C,)}, "ST", C),
        ((A, ST, OP), "STOP", {}, "a", "STOP"),
    ],
)
def test_given_tokens_that_complete_it_are_followed_by_the_terminal_alone(
    given: tuple[int, ...], stop: str, sampling: dict[str, object], text: str, match: str | int | None
) -> None:
    one = Engine(stop, resumed=after(*given), **sampling)
    assert one.generation.is_complete
    assert all(output.finish_reason is None for output in one.outputs)
    one.sample()
    assert (one.terminal.token_ids, one.terminal.is_resumed, one.terminal.stop_match) == ([], False, match)
    reason = messages.FinishReason.LENGTH if match is None else messages.FinishReason.STOP
    assert one.terminal.finish_reason is reason
    assert one.text == text
    assert one.terminal.usage is not None
    assert one.terminal.usage.completion_tokens == len(given)


@pytest.mark.parametrize(
    ("given", "sampling"),
    [((A, B, C), {"max_tokens": 2}), ((A, EOS, B), {}), ((C, B), {"stop_token_ids": (C,)}), ((A, ST, OP, B), {})],
)
def test_a_completion_that_ends_before_its_last_given_token_is_refused(
    given: tuple[int, ...], sampling: dict[str, object]
) -> None:
    request = engine_request.EngineRequest(
        key="default:g",
        token_ids=[1],
        sampling=engine_request.Sampling(**{"max_tokens": 100} | sampling),  # type: ignore[arg-type]
        stop=("STOP",),
        resumed=after(*given),
    )
    outputs: list[engine_output.Output] = []
    with pytest.raises(errors.RequestError, match=f"token {len(given) - 1} of the {len(given)} given ones") as caught:
        Generation(request, outputs.append, CompletionReader(request, PIECES), accepted_at=0.0).resume([EOS])
    assert (caught.value.error.code, caught.value.error.param) == (errors.Code.INVALID_REQUEST, "resume_from")
    assert not outputs


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_given_tokens_are_read_in_pieces_as_if_they_were_one(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(reader, "_TOKENS_AT_ONCE", 4)
    engine = Engine("STOP", "zz", resumed=after(*[A] * (count - 1), ST))
    engine.sample(C, B)
    assert engine.texts == ["a"] * (count - 1) + ["", "STc ", "b"]
    with pytest.raises(errors.RequestError) as refused:
        Engine("STOP", resumed=after(*[A] * (count - 2), ST, OP, A, B, A, A, A))
    assert refused.value.error.message == f"the completion ends with token {count} of the {count + 5} given ones"


def test_given_tokens_that_take_too_long_to_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend that reads for too long would give up the streams of all others."""
    monkeypatch.setattr(generation, "_MAX_RESUME_S", -1.0)
    with pytest.raises(errors.RequestError) as refused:
        Engine(resumed=after(A, A))
    assert refused.value.error.code is errors.Code.UNSUPPORTED
    assert refused.value.error.param == "resume_from"


def test_what_the_first_worker_did_counts_in_usage_and_timings() -> None:
    one = Engine(max_tokens=3, resumed=after(A, B))
    one.sample(C)
    assert one.terminal.usage == messages.Usage(prompt_tokens=3, completion_tokens=3, total_tokens=6, cached_tokens=2)
    # accepted here at 10.0 and ended at 11.0
    assert one.terminal.timings == messages.Timings(
        queue_ms=250.0, prefill_ms=750.0, ttft_ms=1_000.0, decode_ms=500.0, total_ms=1_500.0
    )


def test_the_first_token_says_how_it_was_reached_but_for_one_that_another_worker_sampled() -> None:
    one = Engine()
    one.sample(A, B)
    assert [output.first_token for output in one.outputs] == [FIRST, None]
    single = Engine(max_tokens=1)
    single.sample(A)
    assert single.terminal.first_token == FIRST
    again = Engine(resumed=after(A))
    again.sample(B)
    assert [output.first_token for output in again.outputs] == [None, None]


def test_known_log_probabilities_belong_to_the_last_given_tokens() -> None:
    known = engine_output.Logprob(B, -0.5, [])
    one = Engine(logprobs=0, resumed=after(A, B, logprobs=[known]))
    assert [output.logprobs for output in one.outputs] == [[known]]


def test_the_next_engine_gets_the_given_tokens_too() -> None:
    one = Engine(resumed=after(A, B))
    one.sample(C)
    assert one.generation.sampled.tolist() == [A, B, C]


def test_a_sink_that_fails_at_a_given_token_refuses_the_request() -> None:
    def fail(output: engine_output.Output) -> None:
        raise ZeroDivisionError

    sampling = engine_request.Sampling(max_tokens=9)
    request = engine_request.EngineRequest(key="default:g", token_ids=[1], sampling=sampling, resumed=after(A))
    with pytest.raises(ZeroDivisionError):
        Generation(request, fail, CompletionReader(request, PIECES), accepted_at=0.0).resume([EOS])
