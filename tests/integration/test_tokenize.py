"""Tokens and their text over NATS, seen by a client that only follows docs/wire.md."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import encoder
from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX, RawClient
from tests.support.system import System

SIM = ("--engine", "sim", "--sim-speedup", "20")


@pytest.fixture
async def system(tmp_path: Path) -> Any:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


async def ask(bare: RawClient, operation: str, payload: dict[str, Any], model: str = "demo") -> dict[str, Any]:
    answer = await bare.nats.request(f"{PREFIX}.{operation}.{model}", json.dumps(payload).encode(), timeout=60)
    reply: dict[str, Any] = json.loads(answer.data)
    return reply


async def test_the_tokens_of_a_prompt_are_those_that_generate_uses(system: System) -> None:
    """`demo` is tokenized by the router, and the simulator's prompts by its worker."""
    system.router("router")
    system.worker("gguf")
    system.worker("sim", *SIM, model="dynamo", served_name="sim")
    bare = await system.connect()
    await until_ready(bare, 2)
    long = "12 + 30 = 42. " * 300  # tokenized on a thread
    said = [{"role": "user", "content": "What is 12 + 30?"}]
    begun = {"messages": [*said, {"role": "assistant", "content": "It is"}], "continue_final_message": True}
    for model in ("demo", "sim"):
        for prompt in ({"prompt": "12 + 30 ="}, {"prompt": long}, {"messages": said}, *([begun] * (model == "demo"))):
            found = await ask(bare, "tokenize", {"id": "mine", **prompt}, model)
            assert (found["id"], found["model"]) == ("mine", model), found
            assert found["count"] == len(found["token_ids"])
            counted = await ask(bare, "tokenize", {"only_count": True, **prompt}, model)
            assert (counted["count"], counted["context_length"]) == (found["count"], found["context_length"])
            assert "token_ids" not in counted
            if found["count"] < found["context_length"]:
                request = {**prompt, "max_tokens": 1, "stream": False}
                answer = await bare.ask(request, subject=f"{PREFIX}.generate.{model}")
                assert answer.terminals[0]["usage"]["prompt_tokens"] == found["count"]
    with_bos = await ask(bare, "tokenize", {"prompt": "12"})
    plain = await ask(bare, "tokenize", {"prompt": "12", "add_special_tokens": False})
    assert with_bos["token_ids"][-plain["count"] :] == plain["token_ids"]
    empty = await ask(bare, "tokenize", {"prompt": "", "add_special_tokens": False})
    assert (empty["count"], empty["token_ids"]) == (0, [])
    packed = msgspec.msgpack.encode({"prompt": "12"})
    headers = {"Content-Type": "application/msgpack"}
    answer = await bare.nats.request(f"{PREFIX}.tokenize.demo", packed, timeout=60, headers=headers)
    assert msgspec.msgpack.decode(answer.data)["token_ids"] == with_bos["token_ids"]
    finished = [line for line in system.log("router") if line["event"] == "call_finished"]
    assert {line["code"] for line in finished} == {None}
    assert {line["op"] for line in finished} == {"tokenize"}
    assert (await ask(bare, "tokenize", begun, "sim"))["error"]["code"] == "unsupported"  # as for generate


async def test_the_text_of_tokens_is_that_of_a_completion(system: System) -> None:
    system.router("router")
    system.worker("gguf")
    bare = await system.connect()
    await until_ready(bare, 1)
    for text in ("12 + 30 = 42", "Grüß Gott \U0001f600", ""):
        found = await ask(bare, "tokenize", {"prompt": text})
        assert (await ask(bare, "detokenize", {"token_ids": found["token_ids"]}))["text"] == text
    asked = {"prompt": "12 + 30 =", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = await bare.ask(asked)
    token_ids = [token for message in answer.messages for token in message.get("token_ids", ())]
    assert (await ask(bare, "detokenize", {"id": "mine", "token_ids": token_ids})) == {
        "id": "mine",
        "model": "demo",
        "text": answer.text,
    }
    whole = (await ask(bare, "tokenize", {"prompt": "\U0001f600", "add_special_tokens": False}))["token_ids"]
    assert len(whole) > 1
    assert (await ask(bare, "detokenize", {"token_ids": whole[:-1]}))["text"].endswith("�")


async def test_a_wrong_request_is_answered_with_its_fault(system: System, tmp_path: Path) -> None:
    encoder.write(tmp_path / "encoder")
    system.router("router")
    system.worker("generates")
    system.worker("embeds", model=tmp_path / "encoder", served_name="encoder")
    bare = await system.connect()
    await until_ready(bare, 2)
    said = [{"role": "user", "content": "x"}]
    tool = {"type": "function", "function": {"name": "f"}}
    for operation, wrong, code, param in (
        ("tokenize", {}, "invalid_request", "prompt"),
        ("tokenize", {"prompt": "x", "messages": said}, "invalid_request", "prompt"),
        ("tokenize", {"prompt": 5}, "invalid_request", "prompt"),
        ("tokenize", {"messages": []}, "invalid_request", "messages"),
        ("tokenize", {"messages": [{"role": ""}]}, "invalid_request", "messages[0].role"),
        ("tokenize", {"prompt": "x", "tools": [tool]}, "invalid_request", "tools"),
        ("tokenize", {"messages": said, "tools": [{}]}, "invalid_request", "tools[0].type"),
        ("tokenize", {"prompt": "x", "timeout_ms": 0}, "invalid_request", "timeout_ms"),
        ("detokenize", {}, "invalid_request", "token_ids"),
        ("detokenize", {"token_ids": [5, -1]}, "invalid_request", "token_ids[1]"),
        ("detokenize", {"token_ids": [5, 99_999]}, "invalid_request", "token_ids[1]"),
    ):
        reply = await ask(bare, operation, {"id": "wrong", **wrong})
        assert (reply["id"], reply["error"]["code"], reply["error"]["param"]) == ("wrong", code, param), reply
        assert not {"token_ids", "count", "text"} & reply.keys()
    assert (await ask(bare, "tokenize", {"prompt": "x"}, "nobody"))["error"]["code"] == "no_worker"
    assert (await ask(bare, "detokenize", {"token_ids": [1]}, "nobody"))["error"]["code"] == "no_worker"
    # A conversation needs a template, and a model that makes no completions has a tokenizer all the same.
    assert (await ask(bare, "tokenize", {"messages": said}, "encoder"))["error"]["code"] == "unsupported"
    assert (await ask(bare, "tokenize", {"prompt": "the fox"}, "encoder"))["count"] > 0
    words = "word " * 60_000
    reply = await ask(bare, "tokenize", {"id": "long", "prompt": words})
    if "error" in reply:  # its ids need more bytes than its text
        assert reply["error"]["code"] == "payload_too_large"
    assert (await ask(bare, "tokenize", {"prompt": words, "only_count": True}))["count"] >= 60_000
