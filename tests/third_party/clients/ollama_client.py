"""Ollama's library for Python, as its users call it."""

import json
import os
from typing import Any

import httpx
import ollama
from checking import run

client = ollama.Client(host=os.environ["ROOT_URL"])
QUESTION = [{"role": "user", "content": "What is the capital of Avaria?"}]
ANSWER = "The capital of Avaria is Limora."
WEATHER = [{"role": "user", "content": "What is the weather in Oslo?"}]
COMPARE = [{"role": "user", "content": "Which is larger, 9.11 or 9.9?"}]
EXACT = {"temperature": 0}


def get_weather(city: str) -> str:
    """Get the weather.

    Args:
      city: The city.
    """
    return f"7 degrees in {city}"


def refused(call: Any, name: str) -> None:
    try:
        call()
    except ollama.ResponseError as error:
        assert name in error.error, error.error
    else:
        raise AssertionError("it was not refused")


def chat() -> None:
    answer = client.chat("demo", QUESTION, options=EXACT)
    assert answer.message.content == ANSWER, answer
    assert (answer.done, answer.done_reason) == (True, "stop"), answer
    assert min(answer.prompt_eval_count, answer.eval_count) > 0, answer


def chat_streamed() -> None:
    *pieces, last = client.chat("demo", QUESTION, options=EXACT, stream=True)
    assert "".join(one.message.content for one in pieces) == ANSWER, pieces
    assert (last.done, min(last.eval_count, last.total_duration) > 0) == (True, True), last


def generate() -> None:
    assert client.generate("demo", QUESTION[0]["content"], options=EXACT).response == ANSWER


def generate_streamed() -> None:
    pieces = list(client.generate("demo", QUESTION[0]["content"], options=EXACT, stream=True))
    assert "".join(one.response for one in pieces) == ANSWER, pieces


def generate_raw() -> None:
    answer = client.generate("demo", "12 + 30 =", raw=True, options=EXACT | {"num_predict": 3})
    assert answer.response.strip().startswith("42"), answer


def load() -> None:
    assert client.generate("demo").done_reason == "load"
    assert client.chat("demo").done_reason == "load"


def unloading_is_refused() -> None:
    refused(lambda: client.generate("demo", keep_alive=0), "keep_alive")


def thinking() -> None:
    answer = client.chat("scripted", COMPARE, think=True)
    assert answer.message.thinking, answer
    assert "9.9" in answer.message.content, answer


def tools_round_trip() -> None:
    answer = client.chat("scripted", WEATHER, tools=[get_weather])
    (call,) = answer.message.tool_calls
    assert (call.function.name, dict(call.function.arguments)) == ("get_weather", {"city": "Oslo"}), answer
    result = {"role": "tool", "tool_name": "get_weather", "content": "7 degrees"}
    final = client.chat("scripted", [*WEATHER, answer.message, result], tools=[get_weather])
    assert final.message.content == "It is 7 degrees in Oslo.", final


def tools_streamed() -> None:
    pieces = list(client.chat("scripted", WEATHER, tools=[get_weather], stream=True))
    calls = [call for one in pieces for call in one.message.tool_calls or ()]
    assert [dict(one.function.arguments) for one in calls] == [{"city": "Oslo"}], pieces


def schema() -> None:
    wanted = {
        "type": "object",
        "properties": {"city": {"enum": ["Limora", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = client.chat("demo", QUESTION, format=wanted, options=EXACT | {"num_predict": 60}, think=False)
    assert json.loads(answer.message.content)["city"] in ("Limora", "Paris"), answer


def logprobs() -> None:
    answer = client.chat("demo", QUESTION, logprobs=True, top_logprobs=2, options=EXACT)
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in answer.logprobs), answer


def images_are_refused() -> None:
    refused(lambda: client.generate("demo", "What is this?", images=[b"abcd"]), "images")


def unknown_model() -> None:
    refused(lambda: client.chat("nothing", QUESTION), "nothing")


def invalid_option() -> None:
    refused(lambda: client.chat("demo", QUESTION, options={"temperature": -1}), "options.temperature")


def embed() -> None:
    assert len(client.embed("embedder", ["one", "two"]).embeddings) == 2
    assert len(client.embed("embedder", "one").embeddings) == 1


def embeddings() -> None:
    assert len(client.embeddings("embedder", "one").embedding) > 8


def list_models() -> None:
    assert "demo" in {one.model for one in client.list().models}


def ps() -> None:
    running = {one.model: one for one in client.ps().models}
    assert min(running["demo"].size, running["demo"].context_length) > 0, running


def show() -> None:
    shown = client.show("demo")
    assert {"completion", "tools"} <= set(shown.capabilities), shown
    assert "embedding" in client.show("embedder").capabilities


def pull() -> None:
    assert client.pull("demo").status == "success"
    assert [one.status for one in client.pull("demo", stream=True)] == ["success"]
    refused(lambda: client.pull("nothing"), "tokenbus pull")


def create_is_refused() -> None:
    refused(lambda: client.create("new", from_="demo"), "not created")


def copy_is_refused() -> None:
    refused(lambda: client.copy("demo", "other"), "not copied")


def push_is_refused() -> None:
    refused(lambda: client.push("demo"), "not published")


def delete_is_refused() -> None:
    refused(lambda: client.delete("demo"), "not deleted")


def version() -> None:
    assert httpx.get(f"{os.environ['ROOT_URL']}/api/version").json()["version"]


def cancel() -> None:
    stream = client.generate("demo", "Tell me a story about a fox.", options={"num_predict": 400}, stream=True)
    next(stream)
    stream.close()


run(
    chat,
    chat_streamed,
    generate,
    generate_streamed,
    generate_raw,
    load,
    unloading_is_refused,
    thinking,
    tools_round_trip,
    tools_streamed,
    schema,
    logprobs,
    images_are_refused,
    unknown_model,
    invalid_option,
    embed,
    embeddings,
    list_models,
    ps,
    show,
    pull,
    create_is_refused,
    copy_is_refused,
    push_is_refused,
    delete_is_refused,
    version,
    cancel,
)
