"""The validator passes on every stream that keeps the contract and stops at the first output that breaks it."""

import msgspec
import pytest

from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.contract.contract import ContractError, StreamValidator

LENGTH, STOP, CANCELLED, ERROR = (
    messages.FinishReason.LENGTH,
    messages.FinishReason.STOP,
    messages.FinishReason.CANCELLED,
    messages.FinishReason.ERROR,
)
TIMINGS = messages.Timings(queue_ms=0, prefill_ms=0, ttft_ms=0, decode_ms=0, total_ms=0)


def token(*token_ids: int) -> engine_output.Output:
    return engine_output.Output(token_ids=list(token_ids), text="x")


def usage(completion: int, prompt: int = 2, total: int | None = None) -> messages.Usage:
    total = prompt + completion if total is None else total
    return messages.Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=total, cached_tokens=0)


def terminal(
    reason: messages.FinishReason, *token_ids: int, completion: int, **changes: object
) -> engine_output.Output:
    fields: dict[str, object] = {"usage": usage(completion), "timings": TIMINGS}
    if reason is STOP:
        fields["stop_match"] = 0
    if reason is ERROR:
        fields["error"] = errors.make_error(errors.Code.INTERNAL)
    return engine_output.Output(token_ids=list(token_ids), text="", finish_reason=reason, **(fields | changes))  # type: ignore[arg-type]


FIRST = engine_output.FirstTokenStats(cached_tokens=0, queue_ms=0, prefill_ms=0)


def first(output: engine_output.Output) -> engine_output.Output:
    return msgspec.structs.replace(output, first_token=FIRST)


def plain(output: engine_output.Output) -> engine_output.Output:
    return msgspec.structs.replace(output, is_plain=True)


def passed_on(
    *outputs: engine_output.Output, max_tokens: int = 3, min_tokens: int = 0, resumed: tuple[int, ...] = ()
) -> list[engine_output.Output]:
    """Returns the outputs that a sink behind the validator gets."""
    sampling = engine_request.Sampling(max_tokens=max_tokens, min_tokens=min_tokens)
    given = engine_request.ResumedCompletion(token_ids=list(resumed)) if resumed else None
    request = engine_request.EngineRequest(key="default:v", token_ids=[1, 2], sampling=sampling, resumed=given)
    heard: list[engine_output.Output] = []
    validator = StreamValidator(request, heard.append)
    for output in outputs:
        validator(output)
    return heard


GOOD = {
    "length": (token(1), token(2), terminal(LENGTH, 3, completion=3)),
    "several tokens at once": (token(1, 2), terminal(LENGTH, 3, completion=3)),
    "stop": (token(1), terminal(STOP, 2, completion=2)),
    "stop at the last token": (token(1, 2), terminal(STOP, 3, completion=3)),
    "cancelled at once": (terminal(CANCELLED, completion=0),),
    "cancelled later": (token(1), terminal(CANCELLED, completion=1)),
    "error": (token(1), terminal(ERROR, completion=1, timings=None)),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_stream_is_passed_on_as_it_is(name: str) -> None:
    assert passed_on(*GOOD[name]) == list(GOOD[name])


BAD = {
    "more tokens than max_tokens": (token(1, 2, 3), token(4)),
    "only a terminal has usage": (msgspec.structs.replace(token(1), usage=usage(1)),),
    "only a terminal has usage or error": (
        msgspec.structs.replace(token(1), error=errors.make_error(errors.Code.INTERNAL)),
    ),
    "without usage": (terminal(CANCELLED, completion=0, usage=None),),
    "completion_tokens": (token(1), terminal(CANCELLED, completion=2)),
    "prompt_tokens": (terminal(CANCELLED, completion=0, usage=usage(0, prompt=3)),),
    "does not add up": (terminal(CANCELLED, completion=0, usage=usage(0, total=3)),),
    "error and reason disagree": (terminal(ERROR, completion=0, error=None),),
    "error and reason": (terminal(CANCELLED, completion=0, error=errors.make_error(errors.Code.INTERNAL)),),
    "fewer than max_tokens": (token(1), terminal(LENGTH, 2, completion=2)),
    "stop and stop_match disagree": (terminal(STOP, 1, completion=1, stop_match=None),),
    "and stop_match disagree": (terminal(CANCELLED, completion=0, stop_match="x"),),
    "more than tokens and text": (plain(token(1)), plain(first(token(2)))),
    "without timings": (token(1, 2), terminal(LENGTH, 3, completion=3, timings=None)),
}


@pytest.mark.parametrize("rule", BAD)
def test_a_stream_that_breaks_a_rule_is_stopped_at_the_output_that_does(rule: str) -> None:
    with pytest.raises(ContractError, match=rule):
        passed_on(*BAD[rule])
    assert passed_on(*BAD[rule][:-1]) == list(BAD[rule][:-1])


def test_a_stop_with_min_tokens_many_is_too_early_and_with_one_more_it_is_not() -> None:
    with pytest.raises(ContractError, match="stop within min_tokens"):
        passed_on(token(1), terminal(STOP, 2, completion=2), min_tokens=2)
    assert len(passed_on(token(1), terminal(STOP, 2, completion=2), min_tokens=1)) == 2


def given(*token_ids: int, text: str = "xy", texts: tuple[str, ...] = ("x", "y")) -> engine_output.Output:
    return engine_output.Output(token_ids=list(token_ids), text=text, resumed_texts=list(texts))


@pytest.mark.parametrize(
    "outputs",
    [
        (given(7, 8), terminal(LENGTH, 9, completion=3)),
        (given(7, 8), terminal(STOP, completion=2)),
        (given(7, 8), terminal(CANCELLED, completion=2)),
    ],
)
def test_given_tokens_come_before_all_others_and_count(outputs: tuple[engine_output.Output, ...]) -> None:
    assert passed_on(*outputs, resumed=(7, 8)) == list(outputs)


@pytest.mark.parametrize(
    "outputs",
    [
        (token(7, 8),),
        (given(8, 7),),
        (given(7, texts=("xy",)),),
        (given(7, 8, texts=("xy",)),),
        (given(7, 8, text="yx"),),
        (terminal(CANCELLED, completion=0),),
        (given(7, 8), given(9)),
        (first(given(7, 8)),),
        (given(7, 8), first(token(9))),
    ],
)
def test_anything_else_of_a_completion_that_continues_is_stopped(outputs: tuple[engine_output.Output, ...]) -> None:
    with pytest.raises(ContractError, match=r"resumed|first_token"):
        passed_on(*outputs, resumed=(7, 8))
    assert len(passed_on(*outputs[:-1], resumed=(7, 8))) == len(outputs) - 1


def test_only_the_first_token_comes_with_an_account_of_it() -> None:
    assert len(passed_on(first(token(1)), token(2))) == 2
    assert len(passed_on(first(terminal(LENGTH, 1, completion=1)), max_tokens=1)) == 1
    for outputs in ((token(1), first(token(2))), (first(token()),)):
        with pytest.raises(ContractError, match="first_token"):
            passed_on(*outputs)


@pytest.mark.parametrize("after", [token(1), token(), terminal(CANCELLED, completion=1)])
def test_nothing_may_follow_a_terminal(after: engine_output.Output) -> None:
    first = terminal(CANCELLED, completion=0)
    with pytest.raises(ContractError, match="after the terminal"):
        passed_on(first, after)


def test_an_output_that_breaks_a_rule_does_not_reach_the_sink() -> None:
    request = engine_request.EngineRequest(
        key="default:v", token_ids=[1], sampling=engine_request.Sampling(max_tokens=1)
    )
    heard: list[engine_output.Output] = []
    validator = StreamValidator(request, heard.append)
    with pytest.raises(ContractError, match="default:v"):
        validator(token(1, 2))
    assert heard == []
