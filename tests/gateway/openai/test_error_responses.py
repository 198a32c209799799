"""Errors of the wire in OpenAI's words."""

import json

import pytest

from tokenbus.gateway.openai import error_responses
from tokenbus.protocol.wire import errors, messages


@pytest.mark.parametrize("code", errors.Code)
def test_an_error_has_the_status_of_its_code_and_says_whether_to_try_again(code: errors.Code) -> None:
    response = error_responses.from_error(errors.make_error(code, "what it was", param="stop"))
    info = errors.CODES[code]
    assert response.status == info.http
    assert response.headers["x-should-retry"] == str(info.retryable).lower()
    error = json.loads(response.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["message"], error["param"]) == ("what it was", "stop")


@pytest.mark.parametrize(
    ("code", "type", "theirs"),
    [
        (errors.Code.INVALID_REQUEST, "invalid_request_error", "invalid_request"),
        (errors.Code.MODEL_NOT_FOUND, "invalid_request_error", "model_not_found"),
        (errors.Code.PROMPT_TOO_LONG, "invalid_request_error", "context_length_exceeded"),
        (errors.Code.OVERLOADED, "rate_limit_error", "overloaded"),
        (errors.Code.WORKER_LOST, "server_error", "worker_lost"),
    ],
)
def test_types_and_codes_are_those_that_clients_look_for(code: errors.Code, type: str, theirs: str) -> None:
    response = error_responses.from_error(errors.make_error(code))
    assert (response.type, response.code) == (type, theirs)


def test_retry_after_is_in_whole_seconds_upwards_and_also_exact() -> None:
    headers = error_responses.from_error(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=1_200.5)).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1201")
    assert "retry-after" not in error_responses.from_error(errors.make_error(errors.Code.OVERLOADED)).headers


def test_a_terminal_failed_when_it_is_an_error_or_was_cancelled() -> None:
    def terminal(reason: messages.FinishReason | None) -> error_responses.ErrorResponse | None:
        return error_responses.from_terminal(messages.Chunk(id="r", finish_reason=reason))

    assert terminal(None) is terminal(messages.FinishReason.STOP) is terminal(messages.FinishReason.LENGTH) is None
    assert terminal(messages.FinishReason.CANCELLED) == error_responses.CANCELLED
    assert terminal(messages.FinishReason.ERROR) == error_responses.INTERNAL_ERROR


def test_a_wrong_key_says_how_a_key_is_given() -> None:
    assert error_responses.INVALID_API_KEY.headers["www-authenticate"] == "Bearer"
    assert json.loads(error_responses.INVALID_API_KEY.body)["error"]["code"] == "invalid_api_key"
