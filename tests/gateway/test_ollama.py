"""Ollama's API over HTTP."""

import json
import urllib.error
import urllib.request

import pytest

from tests.gateway.test_calls import get, post

SAID = [{"role": "user", "content": "What is the capital of Avaria?"}]
ANSWER = "The capital of Avaria is Limora."


def test_an_answer_is_streamed_as_lines_of_json(base_url: str) -> None:
    body = {"model": "demo:latest", "messages": SAID, "options": {"temperature": 0}}
    asked = urllib.request.Request(
        base_url.removesuffix("/v1") + "/api/chat", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson; charset=utf-8"
        *pieces, last = [json.loads(line) for line in answer.read().splitlines()]
    assert "".join(one["message"]["content"] for one in pieces) == ANSWER
    assert (last["done"], last["done_reason"], last["eval_count"] > 0) == (True, "stop", True)


def test_a_whole_answer_counts_the_same_tokens_as_a_chat_completion(base_url: str) -> None:
    body = {"model": "demo", "messages": SAID, "stream": False, "options": {"temperature": 0}}
    status, found = post(base_url, "/api/chat", body)
    assert (status, found["message"]["content"]) == (200, ANSWER)
    _, completion = post(base_url, "/v1/chat/completions", {"model": "demo", "messages": SAID, "temperature": 0})
    assert found["prompt_eval_count"] == completion["usage"]["prompt_tokens"]
    assert found["eval_count"] == completion["usage"]["completion_tokens"]


def test_a_loaded_model_is_told_with_its_engine_and_its_memory(base_url: str) -> None:
    (running,) = json.loads(get(base_url, "/api/ps"))["models"]
    assert (running["name"], running["details"]["format"]) == ("demo", "gguf")
    assert running["size"] > 1_000_000


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/create"), ("POST", "/api/copy"), ("POST", "/api/push"), ("DELETE", "/api/delete")],
)
def test_a_call_that_is_not_served_says_why(base_url: str, method: str, path: str) -> None:
    asked = urllib.request.Request(base_url.removesuffix("/v1") + path, b"{}", method=method)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=60)
    with refused.value as error:
        assert error.code == 400
        assert "models are not" in json.loads(error.read())["error"]


def test_errors_have_ollamas_form(base_url: str) -> None:
    status, found = post(base_url, "/api/generate", {"model": "demo", "prompt": "a", "options": {"tempratur": 0}})
    assert status == 400
    assert found["error"].startswith("options.tempratur: is not a known field: seed, ")
    status, found = post(base_url, "/api/chat", {"model": "nothing", "messages": SAID})
    assert (status in (404, 503), "nothing" in found["error"]) == (True, True)
