"""Mistral's library."""

import os
from typing import Literal

from checking import run
from mistralai.client import Mistral
from mistralai.client.errors import SDKError
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the capital of Avaria?"}]
ANSWER = "The capital of Avaria is Limora."
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
client = Mistral(api_key="none", server_url=os.environ["ROOT_URL"])


class Capital(BaseModel):
    city: Literal["Limora", "Oslo"]


def ask(**options: object) -> object:
    options = {"model": "demo", "temperature": 0, "max_tokens": 60, **options}
    return client.chat.complete(messages=QUESTION, **options).choices[0].message


def models() -> None:
    found = {one.id: one for one in client.models.list().data}
    assert found["demo"].capabilities.completion_chat
    assert not found["embedder"].capabilities.completion_chat
    assert client.models.retrieve(model_id="demo").id == "demo"


def chat() -> None:
    assert ask(random_seed=3).content == ANSWER


def streaming() -> None:
    events = client.chat.stream(model="demo", messages=QUESTION, temperature=0, max_tokens=60)
    assert "".join(one.data.choices[0].delta.content or "" for one in events) == ANSWER


def any_call() -> None:
    for choice in ("any", "required", {"type": "function", "function": {"name": "look_up"}}):
        (call,) = ask(tools=TOOLS, tool_choice=choice).tool_calls
        assert call.function.name == "look_up", call


def no_call() -> None:
    assert ask(tools=TOOLS, tool_choice="none").content


def continued_answer() -> None:
    begun = {"role": "assistant", "content": "The capital of Avaria is", "prefix": True}
    answer = client.chat.complete(model="demo", messages=[*QUESTION, begun], temperature=0, max_tokens=60)
    assert answer.choices[0].message.content.strip() == "Limora.", answer


def schema() -> None:
    answer = client.chat.parse(Capital, model="demo", messages=QUESTION, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Capital), answer


def embeddings() -> None:
    found = client.embeddings.create(model="embedder", inputs=["a fox", "a hen"])
    assert len(found.data) == 2
    assert found.usage.prompt_tokens > 0


def what_is_not_served_is_refused() -> None:
    ways = {
        "use /v1/completions with a suffix": lambda: client.fim.complete(model="demo", prompt="a", suffix="b"),
        "there are no agents": lambda: client.agents.complete(agent_id="a", messages=QUESTION),
        "there are no classifiers": lambda: client.classifiers.moderate(model="demo", inputs="a"),
        "there are no conversations": lambda: client.beta.conversations.start(model="demo", inputs="a"),
    }
    for said, call in ways.items():
        try:
            call()
        except SDKError as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"{said}: answered")


run(
    models,
    chat,
    streaming,
    any_call,
    no_call,
    continued_answer,
    schema,
    embeddings,
    what_is_not_served_is_refused,
)
