"""LangChain, over OpenAI's and Anthropic's libraries."""

import os
from typing import Literal

from checking import run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

QUESTION = "What is the capital of Avaria?"
ANSWER = "The capital of Avaria is Limora."


class Capital(BaseModel):
    """A city."""

    city: Literal["Limora", "Paris"]
    is_large: bool


@tool
def get_weather(city: str) -> str:
    """Tells the weather of a city."""
    return "7 degrees"


def by_openai(model: str, **options: object) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=os.environ["BASE_URL"], api_key="none", max_retries=0, **options)


def by_anthropic(model: str) -> ChatAnthropic:
    return ChatAnthropic(model=model, base_url=os.environ["ROOT_URL"], api_key="none", max_retries=0, max_tokens=500)


def carry_out(model: object) -> None:
    """Has a model call the tool, and gives it the result."""
    bound = model.bind_tools([get_weather])
    asked = HumanMessage("What is the weather in Oslo?")
    called = bound.invoke([asked])
    assert [call["args"] for call in called.tool_calls] == [{"city": "Oslo"}], called
    call = called.tool_calls[0]
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    final = bound.invoke([asked, called, result])
    assert final.text == "It is 7 degrees in Oslo.", final


def openai_chat() -> None:
    answer = by_openai("demo", temperature=0).invoke(QUESTION)
    assert answer.content == ANSWER, answer
    assert answer.usage_metadata["output_tokens"] > 0


def openai_streaming() -> None:
    assert "".join(chunk.text for chunk in by_openai("demo", temperature=0).stream(QUESTION)) == ANSWER


def openai_tools_round_trip() -> None:
    carry_out(by_openai("scripted"))


def openai_schema() -> None:
    found = by_openai("demo", temperature=0).with_structured_output(Capital, method="json_schema").invoke(QUESTION)
    assert isinstance(found, Capital), found


def openai_embeddings() -> None:
    embed = OpenAIEmbeddings(
        model="embedder", base_url=os.environ["BASE_URL"], api_key="none", check_embedding_ctx_length=False
    )
    assert len(embed.embed_query("a fox")) > 1


def anthropic_messages() -> None:
    answer = by_anthropic("demo").invoke(QUESTION)
    assert answer.text, answer


def anthropic_tools_round_trip() -> None:
    carry_out(by_anthropic("scripted"))


run(
    openai_chat,
    openai_streaming,
    openai_tools_round_trip,
    openai_schema,
    openai_embeddings,
    anthropic_messages,
    anthropic_tools_round_trip,
)
