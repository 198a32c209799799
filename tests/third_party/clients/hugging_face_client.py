"""Hugging Face's InferenceClient."""

import json
import os

from checking import run
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

QUESTION = [{"role": "user", "content": "What is the capital of Avaria?"}]
ANSWER = "The capital of Avaria is Limora."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Limora", "Oslo"]}},
                "required": ["city"],
            },
        },
    }
]
client = InferenceClient(base_url=os.environ["BASE_URL"], api_key="none")


def ask(**options: object) -> object:
    return client.chat_completion(QUESTION, model="demo", temperature=0, max_tokens=60, **options).choices[0]


def chat() -> None:
    assert ask().message.content == ANSWER


def streaming() -> None:
    wanted = {"include_usage": True}
    options = {"model": "demo", "temperature": 0, "max_tokens": 60, "stream": True, "stream_options": wanted}
    chunks = list(client.chat_completion(QUESTION, **options))
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == ANSWER
    assert chunks[-1].usage.completion_tokens > 0


def log_probabilities() -> None:
    first = ask(logprobs=True, top_logprobs=2).logprobs.content[0]
    assert first.logprob <= 0
    assert len(first.top_logprobs) == 2


def schema() -> None:
    place = {"type": "string", "enum": ["Limora", "Oslo"]}
    schema = {"type": "object", "properties": {"city": place}, "required": ["city"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    assert json.loads(ask(response_format=wanted).message.content).keys() == {"city"}


def required_call() -> None:
    (call,) = ask(tools=TOOLS, tool_choice="required").message.tool_calls
    assert call.function.name == "look_up", call


def named_call() -> None:
    (call,) = ask(tools=TOOLS, tool_choice={"function": {"name": "look_up"}}).message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Limora", "Oslo"), call


def name_of_no_model() -> None:
    try:
        client.chat_completion(QUESTION)  # the client asks for `dummy`
    except HfHubHTTPError as error:
        assert "dummy" in str(error), error
    else:
        raise AssertionError("answered")


def text_generation_is_refused() -> None:
    try:
        InferenceClient(base_url=os.environ["ROOT_URL"], api_key="none").text_generation("x")
    except HfHubHTTPError as error:
        assert "use /v1/completions" in str(error), error
    else:
        raise AssertionError("answered")


run(
    chat,
    streaming,
    log_probabilities,
    schema,
    required_call,
    named_call,
    name_of_no_model,
    text_generation_is_refused,
)
