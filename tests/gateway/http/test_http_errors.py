"""Errors of the wire as HTTP tells them."""

import pytest

from tokenbus.gateway.http import http_errors
from tokenbus.protocol.wire import codec, errors, messages

NAMES = {"token_ids": "tokens", "input": "documents"}


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


@pytest.mark.parametrize(
    ("param", "message", "theirs", "shown"),
    [
        ("token_ids", "token_ids: is required", "tokens", "tokens: is required"),
        ("token_ids[3]", "token_ids[3]: too large", "tokens[3]", "tokens[3]: too large"),
        ("input", "ask for less", "documents", "ask for less"),
        ("inputs", "inputs: no", "inputs", "inputs: no"),
        (None, "token_ids is a word", None, "token_ids is a word"),
    ],
)
def test_a_field_has_the_apis_name_in_the_parameter_and_at_the_beginning_of_the_message(
    param: str | None, message: str, theirs: str | None, shown: str
) -> None:
    error = errors.make_error(errors.Code.INVALID_REQUEST, message, param=param)
    name_of = http_errors.by_field(NAMES)
    found, response = http_errors.renamed(error, name_of), http_errors.renamed(http_errors.from_error(error), name_of)
    assert (found.param, found.message) == (response.param, response.message) == (theirs, shown)


def test_an_error_that_gets_an_apis_name_of_its_field_keeps_all_else() -> None:
    error = errors.Error(
        code=errors.Code.PROMPT_TOO_LONG,
        message="token_ids: too many",
        retryable=True,
        param="token_ids",
        retry_after_ms=5.0,
        prompt_tokens=9,
        context_length=8,
    )
    expected = codec.replace(error, message="tokens: too many", param="tokens")
    name_of = http_errors.by_field(NAMES)
    assert http_errors.renamed(http_errors.from_error(error), name_of) == http_errors.from_error(expected)
    with pytest.raises(errors.RequestError) as raised, http_errors.renaming(name_of):
        raise errors.RequestError(error)
    assert raised.value.error == expected
