"""Embeddings over NATS, seen by a client that only follows docs/wire.md."""

import asyncio
import base64
import json
import math
import os
import signal
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from tests.support import encoder, encoder_math
from tests.support.exact_client import until_ready
from tests.support.models import random_encoder
from tests.support.models.random_encoder import EncoderShape
from tests.support.raw_client import PREFIX, RawClient
from tests.support.system import System
from tokenbus import demo
from tokenbus.worker.engine.gguf import backend


@pytest.fixture
async def system(tmp_path: Path) -> Any:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


async def embed(
    bare: RawClient, payload: dict[str, Any], model: str = "demo", timeout_s: float = 60.0
) -> dict[str, Any]:
    answer = await bare.nats.request(f"{PREFIX}.embed.{model}", json.dumps(payload).encode(), timeout=timeout_s)
    reply: dict[str, Any] = json.loads(answer.data)
    return reply


async def test_embeddings_are_answered_once_under_the_request_s_id(system: System) -> None:
    system.router("router")
    system.worker("worker", model=demo.ONNX_PATH)
    bare = await system.connect()
    await until_ready(bare, 1)
    reply = await embed(bare, {"id": "mine", "input": ["the fox", [5, 6, 7], "the owl"]})
    assert (reply["id"], reply["model"], len(reply["embeddings"])) == ("mine", "demo", 3)
    assert all(math.hypot(*row) == pytest.approx(1, abs=1e-5) for row in reply["embeddings"])
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 3
    one = await embed(bare, {"input": "the fox"})
    assert one["embeddings"][0] == pytest.approx(reply["embeddings"][0], abs=1e-5)
    assert one["id"]
    packed = await embed(bare, {"input": "the fox", "encoding": "base64"})
    row = base64.b64decode(packed["embeddings"][0])
    assert struct.unpack(f"<{len(row) // 4}f", row) == pytest.approx(one["embeddings"][0])
    long = await embed(bare, {"input": "the fox", "normalize": False, "dimensions": 4})
    assert len(long["embeddings"][0]) == 4
    assert math.hypot(*long["embeddings"][0]) != pytest.approx(1, abs=1e-2)
    asked = msgspec.msgpack.encode({"id": "packed", "input": "the fox"})
    headers = {"Content-Type": "application/msgpack"}
    answer = await bare.nats.request(f"{PREFIX}.embed.demo", asked, timeout=60, headers=headers)
    assert msgspec.msgpack.decode(answer.data)["embeddings"][0] == pytest.approx(one["embeddings"][0])

    for wrong, code, param in (
        ({"input": ""}, "invalid_request", "input[0]"),
        ({"input": ["fine", [99_999]]}, "invalid_request", "input[1]"),
        ({"input": "x", "dimensions": 129}, "invalid_request", "dimensions"),
        ({"input": "x", "encoding": "hex"}, "invalid_request", "encoding"),
        ({"input": ["x", "word " * 2_100]}, "prompt_too_long", "input[1]"),
        ({"input": ["x"] * 2_048}, "payload_too_large", "input"),
    ):
        reply = await embed(bare, {"id": "wrong", **wrong})
        assert (reply["id"], reply["error"]["code"], reply["error"]["param"]) == ("wrong", code, param), reply
        assert "embeddings" not in reply
    finished = [line for line in system.log("router") if line["event"] == "call_finished"]
    assert [line["code"] for line in finished[:2]] == [None, None]
    assert len(finished) == len([line for line in system.log("router") if line["event"] == "call_received"])


async def test_a_gguf_model_is_asked_for_embeddings_as_an_onnx_model_is(system: System, tmp_path: Path) -> None:
    shape = EncoderShape("bert", "cls")
    random_encoder.write(tmp_path / "encoder.gguf", shape)
    system.router("router")
    system.worker("embeds", model=tmp_path / "encoder.gguf", served_name="encoder")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    assert not {"generate", "rerank"} & set(card["features"])
    inputs = [[5, 6, 7], [9] * shape.context]
    reply = await embed(bare, {"input": inputs}, "encoder")
    weights = encoder_math.read_weights(tmp_path / "encoder.gguf")
    for found, one in zip(reply["embeddings"], inputs, strict=True):
        truth = encoder_math.row(weights, shape, one)
        assert found == pytest.approx(truth / math.hypot(*truth), abs=1e-3)
    assert reply["usage"]["prompt_tokens"] == 3 + shape.context
    short = await embed(bare, {"input": inputs, "dimensions": 8}, "encoder")
    assert [math.hypot(*row) for row in short["embeddings"]] == pytest.approx([1, 1], abs=1e-5)
    first = reply["embeddings"][0][:8]
    assert short["embeddings"][0] == pytest.approx([number / math.hypot(*first) for number in first], abs=1e-5)
    long = await embed(bare, {"input": [[5], [9] * (shape.context + 1)]}, "encoder")
    assert (long["error"]["code"], long["error"]["param"]) == ("prompt_too_long", "input[1]")


async def test_a_model_without_embeddings_and_one_with_nothing_else_say_so(system: System, tmp_path: Path) -> None:
    encoder.write(tmp_path / "encoder")
    system.router("router")
    system.worker("generates", "--pooling", "none")
    system.worker("embeds", model=tmp_path / "encoder", served_name="encoder")
    bare = await system.connect()
    await until_ready(bare, 2)
    assert (await embed(bare, {"input": "x"}))["error"]["code"] == "unsupported"
    assert (await embed(bare, {"input": "x"}, "nobody"))["error"]["code"] == "no_worker"
    assert len((await embed(bare, {"input": "the fox"}, "encoder"))["embeddings"][0]) == encoder.WIDTH
    answer = await bare.ask({"prompt": "the fox"}, subject=f"{PREFIX}.generate.encoder")
    assert answer.terminals[0]["error"]["code"] == "unsupported"


QUESTIONS = ("What is 12 + 30?", "What is 7 + 8?", "Tell me a story about a fox.", "Tell me a story about an owl.")


async def answers_of(bare: RawClient, max_tokens: int) -> list[str]:
    """Returns what four greedy streams send, all at the same time."""
    asked = [
        {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens}
        for text in QUESTIONS
    ]
    return [answer.text for answer in await asyncio.gather(*map(bare.ask, asked))]


def bare_vectors(inputs: list[list[int]]) -> np.ndarray:
    """Returns the vectors that plain llama.cpp makes with the weights of the demo model, one input at a time."""
    backend.init()  # llama.cpp's lines go to the log
    model = llama.llama_model_load_from_file(str(demo.MODEL_PATH).encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 600
    params.n_threads = params.n_threads_batch = 1
    params.embeddings, params.pooling_type = True, llama.LLAMA_POOLING_TYPE_LAST
    params.flash_attn_type, params.type_k, params.type_v = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED, 0, 0
    context = llama.llama_init_from_model(model, params)
    rows = []
    for one in inputs:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        tokens = (llama.llama_token * len(one))(*one)
        assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(one))) == 0
        pointer = llama.llama_get_embeddings_seq(context, 0)
        rows.append(np.ctypeslib.as_array(pointer, (llama.llama_model_n_embd_out(model),)).copy())
    llama.llama_free(context)
    llama.llama_model_free(model)
    return np.array([row / np.linalg.norm(row) for row in rows])


@pytest.mark.long
async def test_a_worker_that_generates_embeds_beside_its_streams_and_changes_none_of_their_bytes(
    system: System,
) -> None:
    system.router("router")
    exact = ("--flash-attention", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")  # rounds as little as it can
    system.worker("worker", "--step-target-ms", "50", *exact)
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    assert card["embeddings"] == {"dimensions": 128, "pooling": "last", "max_input_tokens": 2_048}
    assert {"generate", "embed"} <= set(card["features"])
    alone = await answers_of(bare, 16)
    inputs = [[5 + (7 * number + place) % 400 for place in range(600)] for number in range(10)]
    replies = [asyncio.create_task(embed(bare, {"input": inputs[start::2], "dimensions": 128})) for start in (0, 1)]
    await system.until_logged("router", "call_received")
    beside = await answers_of(bare, 16)
    assert not all(reply.done() for reply in replies), "they were not at the same time"
    assert beside == alone
    rows = [row for reply in replies for row in (await reply)["embeddings"]]
    truth = await asyncio.to_thread(bare_vectors, [*inputs[0::2], *inputs[1::2]])
    assert np.abs(np.array(rows) - truth).max() < 1e-3
    assert np.abs(truth[0] - truth[1]).max() > 2e-2
    again = await bare.ask({"token_ids": inputs[0], "max_tokens": 1})
    assert again.terminals[0]["usage"]["cached_tokens"] == 0
    for wrong, code in (([5] * 2_049, "prompt_too_long"), ([99_999], "invalid_request")):
        refused = await embed(bare, {"input": [[5], wrong]})
        assert (refused["error"]["code"], refused["error"]["param"]) == (code, "input[1]")


async def test_an_engine_killed_while_it_embeds_beside_streams_loses_neither(system: System) -> None:
    system.router("router")
    system.worker("worker", "--step-target-ms", "50")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    alone = await answers_of(bare, 40)
    os.kill(card["pids"]["engine"], signal.SIGSTOP)
    reply = asyncio.create_task(embed(bare, {"input": [[5] * 1_000] * 12}))
    beside = asyncio.create_task(answers_of(bare, 40))
    await system.until_logged("router", "call_received")
    os.kill(card["pids"]["engine"], signal.SIGKILL)
    assert await beside == alone
    assert len((await reply)["embeddings"]) == 12


async def test_embeddings_whose_engine_is_killed_are_made_by_the_next_engine_of_the_same_worker(
    system: System, tmp_path: Path
) -> None:
    random_encoder.write(tmp_path / "encoder.gguf", EncoderShape("bert", "mean"))
    system.router("router")
    system.worker("embeds", model=tmp_path / "encoder.gguf", served_name="encoder")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    os.kill(card["pids"]["engine"], signal.SIGSTOP)  # so that it is killed in the middle
    reply = asyncio.create_task(embed(bare, {"input": [[5] * 90] * 30}, "encoder"))
    await system.until_logged("router", "call_received")
    os.kill(card["pids"]["engine"], signal.SIGKILL)
    assert len((await reply)["embeddings"]) == 30


async def test_embeddings_that_are_cancelled_end_at_once_and_leave_the_worker_free(
    system: System, tmp_path: Path
) -> None:
    random_encoder.write(tmp_path / "encoder.gguf", EncoderShape("bert", "mean"))
    system.router("router")
    system.worker("embeds", model=tmp_path / "encoder.gguf", served_name="encoder")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    os.kill(card["pids"]["engine"], signal.SIGSTOP)
    asked = {"id": "mine", "input": [[5] * 90] * 30}
    reply = asyncio.create_task(embed(bare, asked, "encoder"))
    await system.until_logged("router", "call_received")
    answer = await bare.nats.request(f"{PREFIX}.cancel.mine", b"", timeout=60)
    assert json.loads(answer.data) == {"cancelled": True}
    ended = await reply
    os.kill(card["pids"]["engine"], signal.SIGCONT)
    assert (ended["id"], ended["error"]["code"], ended["error"]["retryable"]) == ("mine", "cancelled", False)
    assert len((await embed(bare, asked, "encoder"))["embeddings"]) == 30


async def test_embeddings_whose_worker_is_killed_are_made_by_another(system: System) -> None:
    system.router("router")
    system.worker("first", model=demo.ONNX_PATH)
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    os.kill(card["pids"]["engine"], signal.SIGSTOP)  # so that it is killed in the middle
    asked = {"id": "x", "input": [[5 + number % 5] * 100 for number in range(30)], "dimensions": 4}
    reply = asyncio.create_task(embed(bare, asked, timeout_s=60))
    await system.until_logged("router", "call_received")
    system.worker("second", model=demo.ONNX_PATH)
    await until_ready(bare, 2)
    assert not reply.done()
    system.signal("first", signal.SIGKILL)
    os.kill(card["pids"]["engine"], signal.SIGKILL)  # frozen, it would not see that its frontend is gone
    assert len((await reply)["embeddings"]) == 30
