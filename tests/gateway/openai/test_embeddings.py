"""OpenAI's embeddings, as requests and replies of the wire."""

import json
from typing import Any

import pytest

from tokenbus.gateway.openai import embeddings
from tokenbus.gateway.serving.dialect import ParsedCall
from tokenbus.protocol.wire import errors, messages

USAGE = messages.Usage(prompt_tokens=7, completion_tokens=0, total_tokens=7, cached_tokens=0)
HALVES = "AAAAPwAAAL8="
"""0.5 and -0.5."""


def parse(given: Any = "x", **fields: Any) -> ParsedCall:
    return embeddings.ENDPOINT.parse(json.dumps({"model": "m", "input": given} | fields).encode(), {}, "r")


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", "a"),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
    ],
)
def test_every_kind_of_input_has_its_form_on_the_wire(given: Any, inputs: Any) -> None:
    assert parse(given, dimensions=3, user="u").request == messages.EmbedRequest(
        id="r", input=inputs, dimensions=3, encoding="base64"
    )


def test_dimensions_have_mistral_s_name_too() -> None:
    for fields in ({"output_dimension": 3}, {"output_dimension": 3, "dimensions": 3}):
        assert parse("a", **fields).request.dimensions == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], [-1]]}, "input[1]"),
        ({"input": ["a"] * 2_049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"output_dimension": 0}, "output_dimension"),
        ({"output_dimension": 2, "dimensions": 3}, "output_dimension"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(errors.RequestError) as refused:
        parse(**({"given": fields.pop("input")} if "input" in fields else {}), **fields)
    assert refused.value.error.param == param


@pytest.mark.parametrize(("form", "row"), [({}, [0.5, -0.5]), ({"encoding_format": "base64"}, HALVES)])
def test_vectors_have_the_form_that_was_asked_for(form: dict[str, str], row: Any) -> None:
    reply = messages.EmbedReply(id="r", model="served", embeddings=[HALVES, HALVES], usage=USAGE)
    assert json.loads(parse(["a", "b"], **form).encode(reply)) == {
        "id": "embd-r",
        "object": "list",
        "data": [{"object": "embedding", "index": number, "embedding": row} for number in range(2)],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
