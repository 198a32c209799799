"""Completions, streamed and whole, made of chunks."""

import json
from typing import Any

from tokenbus.gateway.openai import completions
from tokenbus.gateway.openai.choices import StreamForm
from tokenbus.gateway.openai.completions import Echo
from tokenbus.gateway.serving.answer_events import AnswerEventReader
from tokenbus.gateway.serving.dialect import ResponseHead
from tokenbus.protocol.wire import messages

HEAD = ResponseHead("r", 1_700_000_000, "demo")
STOP, LENGTH = messages.FinishReason.STOP, messages.FinishReason.LENGTH
PLAIN: dict[str, Any] = {"n": 1, "echoes": [Echo()], "form": StreamForm(include_usage=False)}


def usage(prompt: int, generated: int) -> messages.Usage:
    return messages.Usage(
        prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated, cached_tokens=min(1, prompt)
    )


def chunk(text: str = "", reason: messages.FinishReason | None = None, **fields: Any) -> messages.Chunk:
    return messages.Chunk(id="r", tokens=1, text=text, finish_reason=reason, **fields)


def token(text: str, logprob: float = -0.5, *top: tuple[str, float]) -> messages.TokenLogprob:
    others = [messages.TokenAlternative(id=9, text=other, bytes=[], logprob=value) for other, value in top]
    return messages.TokenLogprob(id=5, text=text, bytes=[], logprob=logprob, top=others)


def streamed(form: dict[str, Any], *chunks: tuple[int, messages.Chunk]) -> list[Any]:
    encoder, readers = (
        completions.CompletionEncoder(HEAD, **form),
        [AnswerEventReader() for _ in form["echoes"] * form["n"]],
    )
    encoded = [event for number, one in chunks for event in encoder.encode(number, readers[number].read(one))]
    lines = b"".join(encoded + encoder.end()).decode().split("\n\n")
    assert lines.pop() == ""
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def whole(form: dict[str, Any], *answers: list[messages.Chunk]) -> Any:
    readers = []
    for chunks in answers:
        readers.append(AnswerEventReader())
        for one in chunks:
            readers[-1].read(one)
    return json.loads(completions.CompletionEncoder(HEAD, **form).whole(readers))


def test_a_stream_has_the_text_and_then_the_reason() -> None:
    events = streamed(PLAIN, (0, chunk("a")), (0, chunk("b", STOP, usage=usage(3, 2))))
    assert [event["choices"][0] for event in events] == [
        {"text": "a", "index": 0, "logprobs": None, "finish_reason": None},
        {"text": "b", "index": 0, "logprobs": None, "finish_reason": "stop"},
    ]
    assert {(event["id"], event["object"], event["model"]) for event in events} == {
        ("cmpl-r", "text_completion", "demo")
    }
    assert all("usage" not in event for event in events)


def test_tokens_without_text_make_no_event() -> None:
    assert streamed(PLAIN, (0, chunk()), (0, chunk())) == []


def test_the_prompt_is_echoed_once_before_each_of_its_answers() -> None:
    form = {"n": 2, "echoes": [Echo("A"), Echo("B")], "form": StreamForm(include_usage=False)}
    events = streamed(form, *[(number, chunk(text)) for text in "xy" for number in range(4)])
    texts = [
        "".join(event["choices"][0]["text"] for event in events if event["choices"][0]["index"] == n) for n in range(4)
    ]
    assert texts == ["Axy", "Axy", "Bxy", "Bxy"]
    found = whole(form, *[[chunk("x", LENGTH)]] * 4)
    assert [one["text"] for one in found["choices"]] == ["Ax", "Ax", "Bx", "Bx"]
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]


def test_an_answer_that_ends_without_text_is_its_prompt_alone() -> None:
    form = {"n": 1, "echoes": [Echo("A")], "form": StreamForm(include_usage=False)}
    (event,) = streamed(form, (0, chunk(reason=STOP)))
    assert (event["choices"][0]["text"], event["choices"][0]["finish_reason"]) == ("A", "stop")


def test_the_usage_is_the_sum_of_what_each_answer_counts() -> None:
    form = {"n": 2, "echoes": [Echo(), Echo()], "form": StreamForm(include_usage=True)}
    ends = [chunk("x", STOP, usage=usage(3, 2)), chunk("x", STOP, usage=usage(0, 4))]
    ends += [chunk("x", STOP, usage=usage(10, 1)), chunk("x", STOP, usage=usage(0, 1))]
    *events, last = streamed(form, *reversed(list(enumerate(ends))))
    assert {event["usage"] for event in events} == {None}
    assert last["choices"] == []
    found = whole(form, *[[end] for end in ends])
    for told in (last["usage"], found["usage"]):
        assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (13, 8, 21)
        assert told["prompt_tokens_details"]["cached_tokens"] == 2


def test_the_sampled_token_is_among_the_likeliest_even_if_it_is_not_one_of_them() -> None:
    told = [token("a", -3.0, ("b", -0.1)), token("b", -0.1, ("b", -0.1)), token("c", -0.5)]
    found = whole(PLAIN, [chunk("abc", LENGTH, logprobs=told)])
    assert found["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -0.1, "a": -3.0}, {"b": -0.1}, {"c": -0.5}]


def scored(*numbers: int) -> list[messages.PromptLogprob]:
    return [
        messages.PromptLogprob(
            id=one, text=str(one), bytes=[], logprob=-1.0 if one else None, rank=1 if one else None, top=[]
        )
        for one in numbers
    ]


def test_a_stream_has_the_log_probabilities_of_the_prompt_before_the_answer_to_it() -> None:
    asked = PLAIN | {"prompt_logprobs": 0}
    chunks = [messages.Chunk(id="r", prompt_logprobs=scored(0, 1)), messages.Chunk(id="r", prompt_logprobs=scored(2))]
    chunks.append(chunk("a", STOP))
    events = [event["choices"][0] for event in streamed(asked, *((0, one) for one in chunks))]
    first, second = ({str(one): {"logprob": -1.0, "rank": 1, "decoded_token": str(one)}} for one in (1, 2))
    assert [event.get("prompt_logprobs") for event in events] == [[None, first], [second], None]
    assert whole(asked, chunks)["choices"][0]["prompt_logprobs"] == [None, first, second]


def test_log_probabilities_are_lists_with_an_item_for_each_token() -> None:
    first, second = token("ab", -0.5, ("ab", -0.5), ("c", -1.0)), token("c", -0.25, ("c", -0.25), ("c", -9.0))
    expected = {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"ab": -0.5, "c": -1.0}, {"c": -0.25}],
        "text_offset": [0, 2],
    }
    found = whole(PLAIN, [chunk("ab", logprobs=[first]), chunk("c", LENGTH, logprobs=[second])])
    assert found["choices"][0]["logprobs"] == expected
    events = streamed(PLAIN, (0, chunk("ab", logprobs=[first])), (0, chunk("c", LENGTH, logprobs=[second])))
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert {name: parts[0][name] + parts[1][name] for name in expected} == expected
