"""Errors have Anthropic's types, statuses and words."""

import json

import pytest

from tokenbus.gateway.anthropic import error_bodies
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.protocol.wire import errors


@pytest.mark.parametrize(
    ("response", "status", "type"),
    [
        *(
            (http_errors.from_error(errors.make_error(code)), status, type)
            for code, status, type in (
                (errors.Code.INVALID_REQUEST, 400, "invalid_request_error"),
                (errors.Code.MODEL_NOT_FOUND, 404, "not_found_error"),
                (errors.Code.PAYLOAD_TOO_LARGE, 413, "request_too_large"),
                (errors.Code.OVERLOADED, 429, "rate_limit_error"),
                (errors.Code.INSUFFICIENT_MEMORY, 529, "overloaded_error"),
                (errors.Code.NO_WORKER, 503, "api_error"),
                (errors.Code.DEADLINE_EXCEEDED, 504, "timeout_error"),
                (errors.Code.INTERNAL, 500, "api_error"),
            )
        ),
        (http_errors.OVERLOADED, 529, "overloaded_error"),
        (http_errors.INVALID_API_KEY, 401, "authentication_error"),
        (http_errors.too_large(5), 413, "request_too_large"),
        (http_errors.CANCELLED, 499, "api_error"),
    ],
)
def test_types_and_statuses_are_those_that_clients_look_for(response: ErrorResponse, status: int, type: str) -> None:
    assert error_bodies.status_of(response) == status
    body = json.loads(error_bodies.encode(response._replace(request_id="q")))
    assert body == {
        "type": "error",
        "error": {"type": type, "message": response.message},
        "request_id": "q",
    }


def test_a_prompt_that_is_too_long_is_told_in_the_words_by_which_agents_know_that_they_must_compact() -> None:
    refused = http_errors.from_error(errors.prompt_too_long(4_096, 4_096).error)
    body = json.loads(error_bodies.encode(refused))
    assert body["error"]["message"] == "prompt is too long: 4096 tokens > 4095 maximum"


@pytest.mark.parametrize(
    ("param", "theirs"),
    [
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("response_format", "output_config.format"),
        ("stop[3]", "stop_sequences.3"),
        ("stop_sequences.3", "stop_sequences.3"),
        ("tools[1].function.parameters", "tools.1.input_schema"),
        ("tools", "tools"),
    ],
)
def test_fields_that_a_router_or_worker_refuses_have_anthropics_names(param: str, theirs: str) -> None:
    refused = http_errors.from_error(errors.invalid_field(param, "is odd").error)
    assert error_bodies.message_of(refused) == f"{theirs}: is odd"


def test_a_message_that_does_not_name_its_field_stays_as_it_is() -> None:
    refused = errors.request_error(errors.Code.INVALID_REQUEST, "stopwatches are odd", param="stop")
    assert error_bodies.message_of(http_errors.from_error(refused.error)) == "stopwatches are odd"
