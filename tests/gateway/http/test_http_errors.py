"""Errors of the wire as HTTP tells them."""

import pytest

from tokenbus.gateway.http import http_errors
from tokenbus.protocol.wire import errors, messages


@pytest.mark.parametrize("code", errors.Code)
def test_an_error_has_the_status_of_its_code_and_says_whether_to_try_again(code: errors.Code) -> None:
    response = http_errors.from_error(errors.make_error(code, "what it was", param="stop"))
    info = errors.CODES[code]
    assert response.status == info.http
    assert response.headers["x-should-retry"] == str(info.retryable).lower()
    assert (response.message, response.param) == ("what it was", "stop")


def test_retry_after_is_in_whole_seconds_upwards_and_also_exact() -> None:
    headers = http_errors.from_error(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=1_200.5)).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1201")
    assert "retry-after" not in http_errors.from_error(errors.make_error(errors.Code.OVERLOADED)).headers


def test_a_terminal_failed_when_it_is_an_error_or_was_cancelled() -> None:
    def terminal(reason: messages.FinishReason | None) -> http_errors.ErrorResponse | None:
        return http_errors.from_terminal(messages.Chunk(id="r", finish_reason=reason))

    assert terminal(None) is terminal(messages.FinishReason.STOP) is terminal(messages.FinishReason.LENGTH) is None
    assert terminal(messages.FinishReason.CANCELLED) == http_errors.CANCELLED
    assert terminal(messages.FinishReason.ERROR) == http_errors.INTERNAL_ERROR


def test_a_wrong_key_says_how_a_key_is_given() -> None:
    assert http_errors.INVALID_API_KEY.headers["www-authenticate"] == "Bearer"
    assert http_errors.INVALID_API_KEY.code == "invalid_api_key"
