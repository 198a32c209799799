"""The taxonomy is the table of the contract, no more and no less."""

import pytest

from tokenbus.protocol.wire import codec, errors
from tokenbus.protocol.wire.errors import Code

TABLE = {
    "invalid_request": (400, False),
    "prompt_too_long": (400, False),
    "unsupported": (400, False),
    "unauthorized": (401, False),
    "forbidden": (403, False),
    "model_not_found": (404, False),
    "duplicate_request": (409, False),
    "payload_too_large": (413, False),
    "request_crashes_engine": (422, False),
    "overloaded": (429, True),
    "no_worker": (503, True),
    "insufficient_memory": (503, True),
    "keys_unavailable": (503, True),
    "worker_lost": (502, True),
    "engine_poisoned": (503, True),
    "deadline_exceeded": (504, False),
    "cancelled": (499, False),
    "shutting_down": (503, True),
    "upload_lost": (503, True),
    "internal": (500, True),
}


def test_codes_statuses_and_retryability_are_those_of_the_contract() -> None:
    assert {code.value: (info.http, info.retryable) for code, info in errors.CODES.items()} == TABLE


def test_every_code_has_a_kind_and_every_kind_something_to_say() -> None:
    assert set(errors.CODES) == set(Code)
    assert all(info.message for info in errors.CODES.values())


@pytest.mark.parametrize("code", Code)
def test_an_error_without_more_to_say_says_what_its_code_means(code: Code) -> None:
    info = errors.CODES[code]
    assert errors.make_error(code) == errors.Error(code=code, message=info.message, retryable=info.retryable)


def test_an_error_keeps_what_it_is_given() -> None:
    error = errors.make_error(Code.OVERLOADED, "the queue holds 64 of 64", param="priority", retry_after_ms=250.0)
    assert error == errors.Error(
        code=Code.OVERLOADED,
        message="the queue holds 64 of 64",
        retryable=True,
        param="priority",
        retry_after_ms=250.0,
    )


def test_the_exception_carries_its_error_and_reads_as_code_and_message() -> None:
    raised = errors.request_error(Code.UNSUPPORTED, "no grammar here", param="grammar")
    assert raised.error == errors.make_error(Code.UNSUPPORTED, "no grammar here", param="grammar")
    assert str(raised) == "unsupported: no grammar here"


def test_a_message_with_a_name_that_is_no_text_can_be_sent() -> None:
    error = errors.make_error(Code.INVALID_REQUEST, "a\udcff: is wrong")
    assert error.message == r"a\udcff: is wrong"
    codec.encode(error)
