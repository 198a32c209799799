"""A request to count an input's tokens asks for those of the prompt that a response would have."""

import json

import pytest

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai.responses.endpoints import ENDPOINT, INPUT_TOKENS
from tokenbus.protocol.wire import errors, generate

ASKED = {
    "model": "demo",
    "instructions": "be brief",
    "input": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "reasoning": {"effort": "high"},
}


def test_what_is_counted_is_the_prompt_of_a_response() -> None:
    counted = INPUT_TOKENS.parse(json.dumps(ASKED).encode(), {}, "r-1")
    asked = ENDPOINT.parse(json.dumps(ASKED).encode(), {}, "r-1").requests[0]
    assert counted.model == "demo"
    assert counted.request == generate.TokenizeRequest(
        id="r-1",
        messages=asked.messages,
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        only_count=True,
    )
    reply = generate.TokenizeReply(id="r-1", count=7)
    assert json.loads(counted.encode(reply)) == {"object": "response.input_tokens", "input_tokens": 7}


def test_what_is_wrong_names_the_field_as_the_client_called_it() -> None:
    image = {"role": "user", "content": [{"type": "input_image"}]}
    with pytest.raises(errors.RequestError) as raised:
        INPUT_TOKENS.parse(json.dumps(ASKED | {"input": [image]}).encode(), {}, "r-1")
    assert raised.value.error.param == "input[0].content[0].type"
    counted = INPUT_TOKENS.parse(json.dumps(ASKED).encode(), {}, "r-1")
    shown = counted.named(http_errors.from_error(errors.invalid_field("messages[1].content", "no").error))
    assert shown.param == "input[0].content"
