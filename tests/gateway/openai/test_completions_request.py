"""The bodies of completions, as requests of the wire."""

import json
from typing import Any

import pytest

from tokenbus.gateway.openai import completions
from tokenbus.gateway.serving.answer_events import AnswerEventReader
from tokenbus.gateway.serving.dialect import ParsedGeneration, ResponseHead
from tokenbus.protocol.wire import errors, messages


def parse(prompt: Any = "x", **fields: Any) -> ParsedGeneration:
    body = {"model": "m", "prompt": prompt} | fields
    return completions.ENDPOINT.parse(json.dumps(body).encode(), {}, "r")


def prompts(given: Any) -> list[tuple[str | None, str | list[int] | None]]:
    return [(one.id, one.token_ids if one.prompt is None else one.prompt) for one in parse(given).requests]


def test_every_kind_of_prompt_becomes_one_request_for_each_prompt() -> None:
    assert prompts("a") == [("r", "a")]
    assert prompts(["a", "b"]) == [("r", "a"), ("r-p1", "b")]
    assert prompts([1, 2]) == [("r", b"\1\0\0\0\2\0\0\0")]
    assert prompts([[1, 2], [3]]) == [("r", b"\1\0\0\0\2\0\0\0"), ("r-p1", b"\3\0\0\0")]


def test_what_is_not_given_is_openais_default_or_the_models() -> None:
    assert parse().requests == [messages.GenerateRequest(id="r", prompt="x", max_tokens=16)]
    found = parse()
    assert (found.model, found.stream, found.n) == ("m", False, 1)
    (event,) = found.encoder(ResponseHead("r", 0, "m")).encode(
        0, AnswerEventReader().read(messages.Chunk(id="r", text="a"))
    )
    told = json.loads(event.removeprefix(b"data: "))
    assert (told["choices"][0]["text"], "usage" in told) == ("a", False)


def test_fields_go_to_the_wire() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.5,
        "stop": ["a"],
        "seed": 3,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "logit_bias": {"5": 1.0},
        "logprobs": 2,
        "suffix": "b",
        "top_k": 4,
        "regex": "a+",
        "cache_salt": "s",
        "timeout_ms": 5.0,
    }
    (found,) = parse(**fields, user="u", best_of=1, n=1).requests
    assert found == messages.GenerateRequest(id="r", prompt="x", **fields)


def test_an_empty_suffix_is_none() -> None:
    assert parse(suffix="").requests[0].suffix is None


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": None}, "invalid_request", "prompt"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": ["a", ""]}, "invalid_request", "prompt[1]"),
        ({"prompt": [[1], []]}, "invalid_request", "prompt[1]"),
        ({"prompt": [1, -1]}, "invalid_request", "prompt[1]"),
        ({"prompt": ["a", 1]}, "invalid_request", "prompt"),
        ({"prompt": [[1], "a"]}, "invalid_request", "prompt"),
        ({"prompt": ["a"] * 513}, "invalid_request", "prompt"),
        ({"prompt": ["a"] * 5, "n": 103}, "invalid_request", "prompt"),
        ({"prompt": [1], "suffix": "x"}, "invalid_request", "suffix"),
        ({"max_tokens": -1}, "invalid_request", "max_tokens"),
        ({"n": 0}, "invalid_request", "n"),
        ({"prompt_cache_key": "x" * 257}, "invalid_request", "prompt_cache_key"),
        ({"prompt_cache_key": "x", "session_id": "x" * 257}, "invalid_request", "session_id"),
        ({"logprobs": 21}, "invalid_request", "logprobs"),
        ({"best_of": 2}, "unsupported", "best_of"),
        ({"best_of": 1, "n": 2}, "unsupported", "best_of"),
        ({"prompt_logprobs": -1}, "invalid_request", "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "invalid_request", "logprobs"),
        ({"stream_options": {"include_usage": True}}, "invalid_request", "stream_options"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(errors.RequestError) as refused:
        parse(**fields)
    assert (refused.value.error.code, refused.value.error.param) == (code, param)


def test_as_many_answers_as_the_limit_are_taken() -> None:
    assert len(parse(["a"] * 512).requests) == 512
    assert parse(["a"] * 4, n=128).n == 128
