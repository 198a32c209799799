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


def test_each_token_of_a_text_is_told_in_vllms_and_in_llama_servers_form(client: openai.OpenAI) -> None:
    def ask(**body: object) -> dict[str, Any]:
        return client.post("/../tokenize", body=body, cast_to=dict[str, Any])

    text = "Hé 12"
    plain = ask(prompt=text, add_special_tokens=False)
    assert plain["token_strs"] is None
    told = ask(prompt=text, add_special_tokens=False, return_token_strs=True)
    assert told["tokens"] == plain["tokens"]
    assert len(told["token_strs"]) == told["count"]
    pieces = ask(content=text, with_pieces=True)["tokens"]
    assert [one["id"] for one in pieces] == plain["tokens"]
    parts = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in pieces]
    assert b"".join(parts).decode() == text


def test_the_properties_of_a_tokenizer_are_told(client: openai.OpenAI) -> None:
    info = client.get("/../tokenizer_info", cast_to=dict[str, Any])
    named = client.get("/../tokenizer_info?model=demo", cast_to=dict[str, Any])
    assert info == named
    assert {"bos_token", "eos_token", "chat_template", "vocab_size"} <= set(info)
    assert info["vocab_size"] > 0
    with pytest.raises(openai.APIStatusError, match="nobody"):  # a young router does not know that it is never served
        client.get("/../tokenizer_info?model=nobody", cast_to=dict[str, Any])


def test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens(client: openai.OpenAI) -> None:
    text = "12 + 30 = 42"
    echoed = client.completions.create(**GREEDY | {"max_tokens": 1}, prompt=text, echo=True, logprobs=2).choices[0]
    alone = client.completions.create(**GREEDY | {"max_tokens": 0}, prompt=text, echo=True, logprobs=2).choices[0]
    assert alone.text == text
    assert alone.finish_reason == "length"
    assert echoed.text.startswith(text)
    for choice in (echoed, alone):
        told = choice.logprobs
        assert told is not None
        assert "".join(told.tokens or []) == choice.text
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
        assert all(value <= 0 for value in told.token_logprobs[1:])
        for token, top in zip((told.tokens or [])[1:], told.top_logprobs[1:], strict=True):
            assert len(top) == 2 or (len(top) == 3 and token == min(top, key=lambda text: top[text]))
            assert token in top
        assert len(told.text_offset or []) == len(told.token_logprobs)
    assert alone.logprobs is not None
    assert echoed.logprobs is not None
    assert (echoed.logprobs.tokens or [])[:-1] == alone.logprobs.tokens
    # what follows from the beginning of the text is what the model would have sampled
    sampled = client.completions.create(**GREEDY | {"max_tokens": 2}, prompt="12 + 30 =", logprobs=0).choices[0]
    assert sampled.logprobs is not None
    expected = sampled.logprobs.token_logprobs or []
    assert (alone.logprobs.token_logprobs or [])[-len(expected) :] == pytest.approx(expected, abs=0.02)


def test_a_streamed_echo_is_what_a_whole_one_is_for_texts_and_token_ids(client: openai.OpenAI) -> None:
    token_ids = client.post("/../tokenize", body={"model": "demo", "prompt": "Ünï 3"}, cast_to=dict[str, Any])["tokens"]
    for prompt in ("Ünï 3", token_ids):
        for logprobs in (None, 1):
            asked = GREEDY | {"prompt": prompt, "echo": True, "logprobs": logprobs}
            whole = client.completions.create(**asked).choices[0]
            assert whole.text.startswith("Ünï 3")
            text, tokens = "", list[str]()
            with client.completions.create(**asked, stream=True) as stream:
                for event in stream:
                    text += event.choices[0].text
                    tokens += (event.choices[0].logprobs.tokens or []) if event.choices[0].logprobs else []
            assert text == whole.text
            assert tokens == ((whole.logprobs.tokens or []) if whole.logprobs else [])


def test_log_probabilities_of_a_prompt_in_vllms_form(client: openai.OpenAI) -> None:
    choice = client.completions.create(**GREEDY, prompt="12 + 30 =", extra_body={"prompt_logprobs": 1}).choices[0]
    first, *others = choice.model_extra["prompt_logprobs"]  # type: ignore[index]
    assert first is None
    assert others
    for one in others:
        ranks = [entry["rank"] for entry in one.values()]
        assert 1 in ranks
        assert len(one) == (1 if ranks[0] == 1 else 2)
        assert all(entry["logprob"] <= 0 and "decoded_token" in entry for entry in one.values())
    assert choice.logprobs is None
    asked = GREEDY | {"prompt": "12 + 30 =", "extra_body": {"prompt_logprobs": 1}}
    parts = []
    with client.completions.create(**asked, stream=True) as stream:
        for event in stream:
            assert (
                not parts or "prompt_logprobs" not in (event.choices[0].model_extra or {}) or not event.choices[0].text
            )
            parts += (event.choices[0].model_extra or {}).get("prompt_logprobs", [])
    assert [one and [*one] for one in parts] == [one and [*one] for one in (first, *others)]
    said = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "1"}], max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert said.usage is not None
    scored = said.model_extra["prompt_logprobs"]  # type: ignore[index]
    assert [len(one or {}) for one in scored] == [0] + [1] * (said.usage.prompt_tokens - 1)


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
