"""The demo model continues an answer that the client began, in every dialect that has this, and counts its tokens."""

import json
from typing import Any

import pytest

from tests.gateway.test_calls import post

ASKED = {"role": "user", "content": "What is the capital of Borland?"}
BEGUN = {"role": "assistant", "content": "The capital of Borland is"}
REST = " Teska."
SAID: dict[str, Any] = {"model": "demo", "messages": [ASKED, BEGUN]}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "vLLM's": ("/v1/chat/completions", {"temperature": 0, "continue_final_message": True}),
    "Mistral's": ("/v1/chat/completions", {"temperature": 0, "messages": [ASKED, BEGUN | {"prefix": True}]}),
    "Anthropic's": ("/v1/messages", {"temperature": 0, "max_tokens": 20}),
    "Ollama's": ("/api/chat", {"options": {"temperature": 0}, "stream": False}),
    "Responses": ("/v1/responses", {"temperature": 0, "messages": None, "input": [ASKED, BEGUN]}),
}


def text_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    parts = answer["message"]["content"] if "message" in answer else answer["content"][0]["text"]
    return str(parts)


def num_prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer.get("usage", answer)
    cached = usage.get("cache_read_input_tokens", 0)  # Anthropic's: OpenAI's input_tokens include them
    return int(usage.get("prompt_tokens") or usage.get("prompt_eval_count") or usage["input_tokens"] + cached)


@pytest.mark.parametrize("form", FORMS)
def test_the_answer_has_only_what_is_new(base_url: str, form: str) -> None:
    path, fields = FORMS[form]
    status, answer = post(base_url, path, SAID | fields)
    assert (status, text_of(answer)) == (200, REST)
    _, counted = post(base_url, "/tokenize", SAID | {"continue_final_message": True})
    assert num_prompt_tokens(answer) == counted["count"] == len(counted["tokens"])
    assert post(base_url, "/v1/messages/count_tokens", SAID) == (200, {"input_tokens": counted["count"]})


def test_a_constraint_is_about_the_new_text(base_url: str) -> None:
    fields = {"continue_final_message": True, "temperature": 0, "choice": [" Oslo.", " Teska!"]}
    _, answer = post(base_url, "/v1/chat/completions", SAID | fields)
    assert text_of(answer) == " Teska!"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_question_can_not_be_continued(base_url: str, path: str) -> None:
    status, refused = post(base_url, path, {"model": "demo", "messages": [ASKED], "continue_final_message": True})
    assert (status, refused["error"]["param"]) == (400, "messages[0].role"), json.dumps(refused)
