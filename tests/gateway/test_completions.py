"""Completions of plain prompts, as OpenAI's own client library sees them."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 3}


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    """A client that does not check types: by them, no event of a stream could be without a reason to finish."""
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_whole_completion_and_a_streamed_one_have_the_same_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt="12 + 30 =")
    assert (whole.object, whole.choices[0].text, whole.choices[0].finish_reason) == ("text_completion", " 42", "length")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3
    with client.completions.create(
        **GREEDY, prompt="12 + 30 =", stream=True, stream_options={"include_usage": True}
    ) as stream:
        *events, last = list(stream)
    assert "".join(event.choices[0].text for event in events) == " 42"
    assert last.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_several_prompts_have_their_answers_in_their_order(client: openai.OpenAI) -> None:
    prompts = ["12 + 30 =", "1 + 1 =", "20 + 21 ="]
    found = client.completions.create(**GREEDY, prompt=prompts, n=2, echo=True, seed=1)
    assert [one.index for one in found.choices] == list(range(6))
    for number, prompt in enumerate(prompts):
        for choice in found.choices[2 * number : 2 * number + 2]:
            assert choice.text.startswith(prompt)
    assert found.choices[0].text == found.choices[1].text == "12 + 30 = 42"
    assert found.usage is not None
    alone = [client.completions.create(**GREEDY, prompt=one).usage for one in prompts]
    assert found.usage.prompt_tokens == sum(one.prompt_tokens for one in alone if one is not None)
    texts: dict[int, str] = {}
    with client.completions.create(**GREEDY, prompt=prompts, n=2, echo=True, seed=1, stream=True) as stream:
        for event in stream:
            choice = event.choices[0]
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {one.index: one.text for one in found.choices}


def test_a_prompt_may_be_token_ids(client: openai.OpenAI) -> None:
    token_ids = client.post("/../tokenize", body={"model": "demo", "prompt": "12 + 30 ="}, cast_to=dict[str, Any])[
        "tokens"
    ]
    assert client.completions.create(**GREEDY, prompt=token_ids).choices[0].text == " 42"
    both = client.completions.create(**GREEDY, prompt=[token_ids, token_ids])
    assert [one.text for one in both.choices] == [" 42", " 42"]


def test_log_probabilities_of_a_completion(client: openai.OpenAI) -> None:
    choice = client.completions.create(**GREEDY, prompt="12 + 30 =", logprobs=2).choices[0]
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert "".join(told.tokens) == choice.text
    assert told.token_logprobs is not None
    assert all(value <= 0 for value in told.token_logprobs)
    assert told.top_logprobs is not None
    assert [max(top, key=lambda text: top[text]) for top in told.top_logprobs] == told.tokens
    assert told.text_offset == [sum(map(len, told.tokens[:n])) for n in range(3)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt[1]"),
    ],
)
def test_a_wrong_field_is_named_as_openai_does(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**GREEDY, **fields)
    assert refused.value.param == param


def test_one_prompt_of_several_that_is_too_long_fails_the_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**GREEDY, prompt=["x", "word " * 20_000])
    assert refused.value.code == "context_length_exceeded"
