"""Ollama's embeddings become requests of the wire, and replies lists of numbers."""

import base64
import json
import struct
from typing import Any

import pytest

from tests.support.refusals import refusal_of
from tokenbus.gateway.ollama import embeddings
from tokenbus.gateway.serving.dialect import ApiEndpoint
from tokenbus.protocol.wire import messages

ROW = base64.b64encode(struct.pack("<2f", 0.5, -1.0)).decode()
REPLY = messages.EmbedReply(
    id="r",
    embeddings=[ROW],
    usage=messages.Usage(prompt_tokens=3, completion_tokens=0, total_tokens=3, cached_tokens=0),
)


def parse(endpoint: ApiEndpoint[Any], **fields: Any) -> Any:
    return endpoint.parse(json.dumps({"model": "m:latest"} | fields).encode(), {}, "r")


def test_one_text_or_several_are_embedded() -> None:
    for given in ("a", ["a", "b"]):
        parsed = parse(embeddings.EMBED, input=given, dimensions=2, truncate=False, keep_alive=60)
        assert parsed.request == messages.EmbedRequest(id="r", input=given, dimensions=2, encoding="base64")
    found = json.loads(parsed.encode_timed(REPLY, 0.25))
    assert (found["model"], found["embeddings"], found["prompt_eval_count"]) == ("m:latest", [[0.5, -1.0]], 3)
    assert parsed.model == "m"
    assert (found["total_duration"], found["load_duration"]) == (250_000_000, 0)


def test_the_older_call_embeds_one_prompt() -> None:
    parsed = parse(embeddings.EMBEDDINGS, prompt="a")
    assert json.loads(parsed.encode(REPLY)) == {"embedding": [0.5, -1.0]}


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        (embeddings.EMBED, {}, "input"),
        (embeddings.EMBED, {"input": []}, "input"),
        (embeddings.EMBED, {"input": ["a", ""]}, "input[1]"),
        (embeddings.EMBED, {"input": "a", "dimensions": 0}, "dimensions"),
        (embeddings.EMBED, {"input": "a", "keep_alive": "x"}, "keep_alive"),
        (embeddings.EMBED, {"input": "a", "options": {"x": 1}}, "options.x"),
        (embeddings.EMBEDDINGS, {"prompt": ""}, "prompt[0]"),
    ],
)
def test_a_wrong_field_is_named(endpoint: ApiEndpoint[Any], fields: dict[str, Any], param: str) -> None:
    assert refusal_of(lambda: parse(endpoint, **fields)).param == param
