"""A request to count tokens asks for those of the prompt that a message would have."""

import json

import pytest

from tokenbus.gateway.anthropic.messages import COUNT_TOKENS, ENDPOINT
from tokenbus.gateway.http import http_errors
from tokenbus.protocol.wire import errors, messages

ASKED = {
    "model": "demo",
    "system": "be brief",
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "thinking": {"type": "disabled"},
}


def test_what_is_counted_is_the_prompt_of_a_message() -> None:
    counted = COUNT_TOKENS.parse(json.dumps(ASKED).encode(), {}, "r-1")
    message = ENDPOINT.parse(json.dumps(ASKED | {"max_tokens": 5}).encode(), {}, "r-1").requests[0]
    assert counted.model == "demo"
    assert counted.request == messages.TokenizeRequest(
        id="r-1",
        messages=message.messages,
        tools=message.tools,
        chat_template_kwargs=message.chat_template_kwargs,
        only_count=True,
    )
    assert counted.encode(messages.TokenizeReply(id="r-1", count=7)) == b'{"input_tokens":7}'


def test_what_is_wrong_names_the_field_as_the_client_called_it() -> None:
    image = {"role": "user", "content": [{"type": "image"}]}
    with pytest.raises(errors.RequestError) as raised:
        COUNT_TOKENS.parse(json.dumps(ASKED | {"messages": [image]}).encode(), {}, "r-1")
    assert raised.value.error.param == "messages.0.content.0.type"


def test_an_error_of_a_router_names_the_field_as_the_client_called_it() -> None:
    counted = COUNT_TOKENS.parse(json.dumps(ASKED).encode(), {}, "r-1")
    shown = counted.named(http_errors.from_error(errors.invalid_field("messages[1].content", "no").error))
    assert (shown.param, shown.message) == ("messages.0.content", "messages.0.content: no")
