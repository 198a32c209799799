"""The ids of the tokens of prompts and answers, which clients of vLLM ask for, are those of the tokenizer's paths."""

import json
import urllib.request
from typing import Any

import pytest

from tests.gateway.test_calls import post

ASKED = {"messages": [{"role": "user", "content": "What is the capital of Borland?"}]}
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 6, "return_token_ids": True}


def events_of(base_url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    payload = json.dumps(body | {"stream": True}).encode()
    asked = urllib.request.Request(base_url.removesuffix("/v1") + path, payload, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def text_of(base_url: str, token_ids: list[int]) -> str:
    return str(post(base_url, "/detokenize", {"model": "demo", "tokens": token_ids})[1]["prompt"])


def test_a_chat_has_the_ids_of_its_prompt_and_of_each_answer(base_url: str) -> None:
    _, whole = post(base_url, "/v1/chat/completions", GREEDY | ASKED | {"n": 2})
    _, prompt = post(base_url, "/tokenize", ASKED | {"model": "demo"})
    assert whole["prompt_token_ids"] == prompt["tokens"]
    for choice in whole["choices"]:
        assert len(choice["token_ids"]) == 6
        assert text_of(base_url, choice["token_ids"]) == choice["message"]["content"]
    events = events_of(base_url, "/v1/chat/completions", GREEDY | ASKED)
    assert [event.get("prompt_token_ids") for event in events] == [prompt["tokens"]] + [None] * (len(events) - 1)
    streamed = [one for event in events for one in event["choices"][0].get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"]


def test_a_completion_has_the_ids_of_each_prompt_and_answer(base_url: str) -> None:
    texts = {"prompt": ["The capital of Borland is", "12 + 30 ="]}
    _, whole = post(base_url, "/v1/completions", GREEDY | texts)
    for text, choice in zip(texts["prompt"], whole["choices"], strict=True):
        assert choice["prompt_token_ids"] == post(base_url, "/tokenize", {"model": "demo", "prompt": text})[1]["tokens"]
        assert text_of(base_url, choice["token_ids"]) == choice["text"]
    first = whole["choices"][0]["prompt_token_ids"]
    events = events_of(base_url, "/v1/completions", GREEDY | {"prompt": first})
    assert events[0]["choices"][0]["prompt_token_ids"] == first
    streamed = [one for event in events for one in event["choices"][0].get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_log_probabilities_name_tokens_by_their_ids_if_asked_to(base_url: str, path: str) -> None:
    asked = ASKED | {"logprobs": True} if "chat" in path else {"prompt": "12 + 30 =", "logprobs": 1}
    choice = post(base_url, path, GREEDY | asked | {"return_tokens_as_token_ids": True})[1]["choices"][0]
    found = choice["logprobs"]
    names = [one["token"] for one in found["content"]] if "content" in found else found["tokens"]
    assert names == [f"token_id:{one}" for one in choice["token_ids"]]


def test_what_is_not_asked_for_is_not_there(base_url: str) -> None:
    _, whole = post(base_url, "/v1/chat/completions", GREEDY | ASKED | {"return_token_ids": False})
    assert "prompt_token_ids" not in whole
    assert "token_ids" not in whole["choices"][0]
    status, refused = post(base_url, "/v1/completions", GREEDY | {"prompt": "a", "suffix": "b"})
    assert (status, refused["error"]["param"]) == (400, "return_token_ids")
