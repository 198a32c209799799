"""Errors in OpenAI's words."""

import json

import msgspec
import pytest

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai import error_bodies
from tokenbus.protocol.wire import errors


def test_a_body_has_the_message_and_the_field_as_they_are() -> None:
    response = http_errors.from_error(errors.make_error(errors.Code.INVALID_REQUEST, "what it was", param="stop"))
    error = json.loads(error_bodies.encode(response))["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["message"], error["param"]) == ("what it was", "stop")


@pytest.mark.parametrize(
    ("code", "type", "theirs"),
    [
        (errors.Code.INVALID_REQUEST, "invalid_request_error", "invalid_request"),
        (errors.Code.MODEL_NOT_FOUND, "invalid_request_error", "model_not_found"),
        (errors.Code.PROMPT_TOO_LONG, "invalid_request_error", "context_length_exceeded"),
        (errors.Code.OVERLOADED, "rate_limit_error", "rate_limit_exceeded"),
        (errors.Code.WORKER_LOST, "server_error", "worker_lost"),
    ],
)
def test_types_and_codes_are_those_that_clients_look_for(code: errors.Code, type: str, theirs: str) -> None:
    response = http_errors.from_error(errors.make_error(code))
    error = json.loads(error_bodies.encode(response))["error"]
    assert (error["type"], error["code"]) == (type, theirs)


@pytest.mark.parametrize(("param", "named"), [(None, "messages"), ("messages", "messages"), ("prompt", "prompt")])
def test_a_prompt_that_is_too_long_is_told_in_the_words_by_which_agents_know_that_they_must_compact(
    param: str | None, named: str
) -> None:
    refused = msgspec.structs.replace(errors.prompt_too_long(5_000, 4_096).error, param=param)
    error = json.loads(error_bodies.encode(http_errors.from_error(refused)))["error"]
    assert error["message"] == (
        f"This model's maximum context length is 4096 tokens. However, your {named} resulted in 5000 tokens. "
        f"Please reduce the length of the {named}."
    )


def test_the_gateways_own_limit_is_no_rate_limit_of_the_client() -> None:
    assert json.loads(error_bodies.encode(http_errors.OVERLOADED))["error"]["code"] == "overloaded"
