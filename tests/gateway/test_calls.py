"""Endpoints that generate nothing, over HTTP: they share admission, keys, logs and metrics with those that do."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.system import running_gateway

SAID = [{"role": "user", "content": "What is the capital of Avaria?"}]


def post(base_url: str, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(
        base_url.removesuffix("/v1") + path, payload, {"Content-Type": "application/json"} | headers
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_tokens_of_a_conversation_are_counted_as_a_completion_counts_them(base_url: str) -> None:
    status, found = post(base_url, "/tokenize", {"model": "demo", "messages": SAID})
    assert status == 200
    assert found["count"] == len(found["tokens"])
    _, whole = post(base_url, "/v1/chat/completions", {"model": "demo", "messages": SAID, "max_tokens": 1})
    assert whole["usage"]["prompt_tokens"] == found["count"]
    _, models = post_models(base_url)
    assert found["max_model_len"] == models["data"][0]["context_length"]
    assert post(base_url, "/tokenize/", {"model": "demo", "messages": SAID, "only_count": True})[1]["tokens"] == []


def post_models(base_url: str) -> tuple[int, dict[str, Any]]:
    with urllib.request.urlopen(f"{base_url}/models", timeout=60) as answer:
        return answer.status, json.loads(answer.read())


def test_text_comes_back_from_its_tokens(base_url: str) -> None:
    _, found = post(base_url, "/tokenize", {"model": "demo", "prompt": "Grüß Gott"})
    assert post(base_url, "/detokenize", {"model": "demo", "tokens": found["tokens"]}) == (200, {"prompt": "Grüß Gott"})


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/tokenize", {"model": "demo"}, 400, "invalid_request", "prompt"),
        ("/tokenize", {"model": "nobody", "prompt": "x"}, 503, "no_worker", None),
        ("/tokenize", b"{", 400, "invalid_request", None),
        ("/detokenize", {"model": "demo"}, 400, "invalid_request", "tokens"),
        ("/detokenize", {"model": "demo", "tokens": [5, -5]}, 400, "invalid_request", "tokens[1]"),
        ("/detokenize", {"model": "demo", "tokens": [5, 99_999]}, 400, "invalid_request", "tokens[1]"),
    ],
)
def test_a_wrong_request_is_answered_in_openais_form_with_the_field_that_is_wrong(
    base_url: str, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    found, answer = post(base_url, path, body)
    assert (found, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)


def test_calls_need_a_key_and_are_logged_and_counted_like_completions(slow_url: str, tmp_path: Path) -> None:
    with running_gateway(slow_url, tmp_path, "--metrics-port", "0", "--api-key", "secret=acme") as gateway:
        asked = {"model": "slow", "prompt": "go"}
        assert post(gateway.url, "/tokenize", asked)[0] == 401
        assert post(gateway.url, "/tokenize", asked, Authorization="Bearer secret")[0] == 200
        (page,) = gateway.log("status_page")
        with urllib.request.urlopen(f"http://127.0.0.1:{page['port']}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        logged = [(one["endpoint"], one["model"]) for one in gateway.log("request_received")]
    assert logged == [("/tokenize", None), ("/tokenize", "slow")]
    for status in (200, 401):
        assert f'tokenbus_gateway_requests_total{{endpoint="/tokenize",status="{status}"}} 1.0' in text
