"""A request that names no model is for the only one that can do what it asks."""

import pytest

from tokenbus.protocol.wire.default_model import default_model
from tokenbus.protocol.wire.errors import Code, Error, RequestError

CHAT, EMBEDDER = ["generate", "chat"], ["embed"]


def refusal(served: dict[str, list[str]], feature: str = "generate") -> Error:
    with pytest.raises(RequestError) as raised:
        default_model(served, feature)
    return raised.value.error


def test_the_only_served_model_is_meant() -> None:
    assert default_model({"demo": CHAT}, "generate") == "demo"
    assert default_model({"demo": CHAT}) == "demo"


def test_a_model_that_can_not_do_it_is_not_meant() -> None:
    served = {"demo": CHAT, "bge": EMBEDDER}
    assert default_model(served, "generate") == "demo"
    assert default_model(served, "embed") == "bge"


def test_with_several_the_error_names_them_and_the_field() -> None:
    error = refusal({"b": CHAT, "a": CHAT, "bge": EMBEDDER})
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "model")
    assert error.message == "model: is required while several models are served: a, b"


def test_a_model_that_has_not_been_loaded_yet_could_do_anything() -> None:
    assert default_model({"demo": []}, "rerank") == "demo"
    assert refusal({"demo": CHAT, "other": []}).code == Code.INVALID_REQUEST


def test_where_none_can_do_it_the_error_says_what_is_served() -> None:
    error = refusal({"demo": CHAT}, "rerank")
    assert (error.code, error.param) == (Code.UNSUPPORTED, "model")
    assert error.message == "none of the served models ranks documents: demo"


def test_where_none_is_served_the_request_may_be_repeated() -> None:
    error = refusal({})
    assert (error.code, error.message) == (Code.NO_WORKER, "no model is being served")
    assert error.retryable


def test_of_many_models_only_some_are_named() -> None:
    message = refusal({f"m{number:02}": CHAT for number in range(12)}).message
    assert message.endswith("m08, m09 and 2 more")
