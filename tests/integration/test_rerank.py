"""Documents are ranked over NATS, seen by a client that only follows docs/wire.md."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import encoder_math
from tests.support.exact_client import until_ready
from tests.support.models import random_encoder
from tests.support.models.random_encoder import EncoderShape
from tests.support.raw_client import PREFIX, RawClient
from tests.support.system import System, command
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, messages

SHAPE = EncoderShape("bert", "rank")
QUERY, DOCUMENTS = "ab", ["a fox", "b", "the owl, 7"]
CLS, SEP, FIRST_LETTER = 2, 3, 5


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    random_encoder.write(tmp_path / "ranker.gguf", SHAPE)
    system.router("router")
    system.worker("ranks", model=tmp_path / "ranker.gguf", served_name="ranker")
    yield system
    await system.stop()


async def rerank(bare: RawClient, payload: dict[str, Any], model: str = "ranker") -> dict[str, Any]:
    answer = await bare.nats.request(f"{PREFIX}.rerank.{model}", json.dumps(payload).encode(), timeout=60)
    reply: dict[str, Any] = json.loads(answer.data)
    return reply


async def test_documents_are_answered_once_in_the_order_of_the_model_s_scores(system: System, tmp_path: Path) -> None:
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    assert not {"generate", "embed"} & set(card["features"])
    reply = await rerank(bare, {"id": "mine", "query": "a", "documents": ["b", "c", "d"]})
    assert (reply["id"], reply["model"]) == ("mine", "ranker")
    weights = encoder_math.read_weights(tmp_path / "ranker.gguf")
    truth = [
        float(encoder_math.row(weights, SHAPE, [CLS, FIRST_LETTER, SEP, FIRST_LETTER + place])[0])
        for place in (1, 2, 3)
    ]
    assert [one["index"] for one in reply["results"]] == sorted(range(3), key=lambda place: -truth[place])
    for one in reply["results"]:
        assert one["relevance_score"] == pytest.approx(truth[one["index"]], abs=3e-3)
    assert reply["usage"] == {"prompt_tokens": 12, "completion_tokens": 0, "total_tokens": 12, "cached_tokens": 0}
    best = await rerank(bare, {"query": "a", "documents": ["b", "c", "d"], "top_n": 2})
    assert [one["index"] for one in best["results"]] == [one["index"] for one in reply["results"]][:2]
    packed = msgspec.msgpack.encode({"id": "packed", "query": "a", "documents": ["b", "c", "d"]})
    headers = {"Content-Type": "application/msgpack"}
    answer = await bare.nats.request(f"{PREFIX}.rerank.ranker", packed, timeout=60, headers=headers)
    assert msgspec.msgpack.decode(answer.data)["results"] == reply["results"]

    for wrong, code, param in (
        ({"documents": ["b"]}, "invalid_request", "query"),
        ({"query": "a", "documents": ["b", ""]}, "invalid_request", "documents[1]"),
        ({"query": "a", "documents": ["b", 5]}, "invalid_request", "documents[1]"),
        ({"query": "a", "documents": ["b"] * 1_001}, "invalid_request", "documents"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "invalid_request", "top_n"),
        ({"query": "a", "documents": ["b", "word " * 100]}, "prompt_too_long", "documents[1]"),
        ({"query": "a" * 100, "documents": ["b"]}, "prompt_too_long", "documents[0]"),
    ):
        reply = await rerank(bare, {"id": "wrong", **wrong})
        assert (reply["id"], reply["error"]["code"], reply["error"]["param"]) == ("wrong", code, param), reply
        assert "results" not in reply
    logged = [line["event"] for line in system.log("router")]
    assert logged.count("call_received") == logged.count("call_finished") == 5
    assert logged.count("call_refused") == 5


async def test_a_model_that_scores_and_one_that_does_not_say_so(system: System) -> None:
    system.worker("generates")
    bare = await system.connect()
    await until_ready(bare, 2)
    assert (await rerank(bare, {"query": "a", "documents": ["b"]}, "demo"))["error"]["code"] == "unsupported"
    answer = await bare.nats.request(f"{PREFIX}.embed.ranker", b'{"input": "x"}', timeout=60)
    assert json.loads(answer.data)["error"]["code"] == "unsupported"
    generated = await bare.ask({"prompt": "the fox"}, subject=f"{PREFIX}.generate.ranker")
    assert generated.terminals[0]["error"]["code"] == "unsupported"


async def test_documents_whose_engine_is_killed_are_ranked_by_the_next_engine_of_the_same_worker(
    system: System,
) -> None:
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    os.kill(card["pids"]["engine"], signal.SIGSTOP)  # so that it is killed in the middle
    reply = asyncio.create_task(rerank(bare, {"query": "a", "documents": ["b"] * 100}))
    await system.until_logged("router", "call_received")
    os.kill(card["pids"]["engine"], signal.SIGKILL)
    assert len((await reply)["results"]) == 100


async def test_the_library_and_the_command_rank_documents(system: System) -> None:
    bare = await system.connect()
    await until_ready(bare, 1)
    async with await WireClient.connect(system.url) as client:
        reply = await client.rerank("ranker", messages.RerankRequest(query=QUERY, documents=DOCUMENTS, top_n=2))
        assert reply.results
        with pytest.raises(errors.RequestError, match="invalid_request"):
            await client.rerank("ranker", messages.RerankRequest(query=QUERY))
    arguments = command("rerank", "--nats", system.url, "--model", "ranker", "--top-n", "2", QUERY, *DOCUMENTS)
    done = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True, timeout=60, check=True)
    printed = [line.split("\t") for line in done.stdout.splitlines()]
    assert [text for _, text in printed] == [DOCUMENTS[one.index] for one in reply.results]
    for (score, _), one in zip(printed, reply.results, strict=True):
        assert float(score) == pytest.approx(one.relevance_score, abs=1e-4)
