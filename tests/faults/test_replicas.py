"""Replicas in one process share weights, memory and crashes; models are loaded and unloaded beside them."""

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec

from tests.support import broken_models
from tests.support.exact_client import cards, until_idle, until_ready
from tests.support.raw_client import PREFIX, RawClient, check_stream
from tests.support.system import System
from tokenbus import demo

LONG = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "temperature": 0}


async def control(bare: RawClient, card: dict[str, Any], **message: Any) -> list[dict[str, Any]]:
    """Returns all replies to a control message."""
    replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    inbox = bare.nats.new_inbox()

    async def take(reply: Any) -> None:
        replies.put_nowait(msgspec.msgpack.decode(reply.data))

    await bare.nats.subscribe(inbox, cb=take)
    subject = f"{PREFIX}.worker.{card['model']}.{card['worker_id']}.control"
    await bare.nats.publish(subject, msgspec.msgpack.encode(message), reply=inbox)
    told = []
    async with asyncio.timeout(60):
        while not told or (told[-1]["ok"] and told[-1].get("progress", 1) < 1):
            told.append(await replies.get())
    return told


async def test_replicas_have_cards_of_their_own_and_one_engine_process_within_the_budget(system: System) -> None:
    system.router("router")
    system.worker("worker", "--replicas", "3", "--kv-budget", "4", "--context-length", "512")
    bare = await system.connect()
    found = await until_ready(bare, 3)
    assert sorted(card["worker_id"] for card in found) == ["worker-1", "worker-2", "worker-3"]
    assert len({card["pids"]["engine"] for card in found}) == 1
    tokens = sum(card["total_kv_blocks"] * card["kv_block_size"] for card in found)
    assert 0.9 * (4 << 20) < tokens * _bytes_per_token() <= 4 << 20
    answers = [await bare.generate(LONG | {"max_tokens": 100}) for _ in range(9)]
    workers = {(await answer.terminal())["worker_id"] for answer in answers}
    assert workers == {"worker-1", "worker-2", "worker-3"}


async def test_when_the_engine_process_is_killed_every_replicas_streams_go_on(system: System) -> None:
    system.router("router")
    system.worker("worker", "--replicas", "2")
    bare = await system.connect()
    found = await until_ready(bare, 2)
    answers = [await bare.generate(LONG | {"max_tokens": 300}) for _ in range(4)]
    for answer in answers:
        await answer.until(3)
    os.kill(found[0]["pids"]["engine"], signal.SIGKILL)
    for answer in answers:
        terminal = await answer.terminal(timeout_s=60)
        assert terminal["finish_reason"] == "length", terminal
        check_stream(answer)
    assert {answer.messages[-1]["worker_id"] for answer in answers} == {"worker-1", "worker-2"}
    after = await until_ready(bare, 2)
    assert len({card["pids"]["engine"] for card in after}) == 1
    assert after[0]["pids"]["engine"] != found[0]["pids"]["engine"]


async def test_a_model_is_loaded_and_unloaded_beside_another_whose_streams_notice_nothing(
    system: System, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    shutil.copyfile(demo.MODEL_PATH, other)
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    running = [await bare.generate(LONG | {"max_tokens": 900}) for _ in range(2)]
    told = await control(bare, card, op="load", model=str(other), replicas=2, settings={"context_length": 256})
    assert told[0] == {"ok": True, "progress": 0.0}
    assert told[-1] == {"ok": True, "progress": 1.0, "worker_ids": ["worker-2", "worker-3"]}
    loaded = [one for one in await until_ready(bare, 3) if one["model"] == "other"]
    assert [one["context_length"] for one in loaded] == [256, 256]
    assert {one["pids"]["engine"] for one in loaded} == {card["pids"]["engine"]}
    answer = await bare.ask(
        {"prompt": "12 + 30 =", "max_tokens": 3, "temperature": 0}, subject=f"{PREFIX}.generate.other"
    )
    assert answer.text == " 42"
    for one in loaded:
        assert await control(bare, one, op="unload") == [{"ok": True}]
    async with asyncio.timeout(60):
        while any(one["model"] == "other" for one in await cards(bare)):
            await asyncio.sleep(0.05)
    for answer in running:
        assert (await answer.terminal())["usage"]["completion_tokens"] == 900
        check_stream(answer)
    await until_idle(bare)
    assert len([line for line in system.log("worker") if line["event"] == "engine_ready"]) == 3


async def test_a_load_whose_replica_was_drained_meanwhile_does_not_say_that_it_serves(
    system: System, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    shutil.copyfile(demo.MODEL_PATH, other)
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    loading = asyncio.create_task(control(bare, card, op="load", model=str(other), replicas=6))
    async with asyncio.timeout(60):
        while not (first := [one for one in await cards(bare) if one["worker_id"] == "worker-2"]):
            await asyncio.sleep(0.02)
    assert await control(bare, first[0], op="unload") == [{"ok": True}]
    last = (await loading)[-1]
    assert not last["ok"], last
    assert last["error"]["code"] == "no_worker"
    assert "other was drained while it was loading" in last["error"]["message"]


async def test_a_load_takes_its_memory_out_of_the_budget_until_it_is_unloaded(system: System) -> None:
    system.router("router")
    budget = ("--memory-budget-mib", "400", "--host-cache-mib", "0")
    system.worker("worker", *budget)
    bare = await system.connect()
    async with asyncio.timeout(60):
        while not (found := await cards(bare)):
            await asyncio.sleep(0.05)
    (card,) = found
    message = {"op": "load", "model": str(demo.MODEL_PATH), "served_name": "other"}
    told = await control(bare, card, **message, replicas=6)
    assert not told[-1]["ok"], "a process with its libraries counts 96 MiB for each replica"
    assert "are left of the budget" in told[-1]["error"]["message"]
    async with asyncio.timeout(60):
        while len(await cards(bare)) > 1:
            await asyncio.sleep(0.05)
        # what a failed load has taken is given back once its replicas have ended, a moment after their last card
        while not (await control(bare, card, **message))[-1]["ok"]:
            await asyncio.sleep(0.05)


async def test_a_load_that_can_not_be_done_says_why_and_disturbs_nobody(system: System, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    shutil.copyfile(demo.MODEL_PATH, broken)
    os.truncate(broken, 200_000)
    pipe, itself = tmp_path / "pipe.gguf", tmp_path / "itself"
    os.mkfifo(pipe)
    itself.symlink_to("itself")
    system.router("router")
    system.worker("worker", "--kv-budget", "4", "--context-length", "512", "--kv-tokens", "1024")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    running = await bare.generate(LONG | {"max_tokens": 400})
    for message, said in (
        ({"model": "/nowhere.gguf"}, "/nowhere.gguf: there is no such file"),
        ({"model": str(pipe)}, "pipe.gguf: is no regular file"),
        ({"model": str(itself)}, "itself: can't be read: Too many levels of symbolic links"),
        ({"model": "/dev/zero"}, "/dev/zero: is no regular file"),
        ({"model": f"/{'x' * 300}/m.gguf"}, "can't be read: File name too long"),
        ({"model": str(broken)}, "broken.gguf"),
        ({"model": str(demo.MODEL_PATH), "replicas": 0}, "replicas must be 1 to"),
        ({"model": str(demo.MODEL_PATH), "settings": {"colour": 1}}, "settings.colour is not an engine setting"),
        ({"model": str(demo.MODEL_PATH), "settings": {"kv_tokens": "many"}}, "settings: "),
        ({"model": str(demo.MODEL_PATH), "replicas": 30}, "--kv-budget leaves"),
    ):
        told = await control(bare, card, op="load", **message)
        assert not told[-1]["ok"]
        assert said in told[-1]["error"]["message"], told
    assert await control(bare, card, op="load") == [{"ok": True, "progress": 1.0}], "its own model is loaded"
    assert (await running.terminal())["usage"]["completion_tokens"] == 400
    async with asyncio.timeout(60):
        while len(await cards(bare)) > 1:
            await asyncio.sleep(0.05)
    assert (await bare.ask({"prompt": "12 + 30 =", "max_tokens": 3, "temperature": 0})).text == " 42"


async def test_a_model_on_which_the_engine_dies_is_refused_and_ends_no_neighbour_s_engine(
    system: System, tmp_path: Path
) -> None:
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    running = await bare.generate(LONG | {"max_tokens": 400})
    await running.until(3)
    broken = (broken_models.NO_BLOCKS, broken_models.NAN, broken_models.NEGATIVE)
    for number, (key, value) in enumerate(broken):
        path = broken_models.with_value(tmp_path / f"{number}.gguf", key, value)
        told = await control(bare, card, op="load", model=str(path))
        assert not told[-1]["ok"], key
        assert told[-1]["error"]["code"] == "invalid_request", told
    assert (await running.terminal())["usage"]["completion_tokens"] == 400
    assert running.terminals[0]["attempt"] == 1, "its engine has not ended"
    assert not system.logged("worker", "engine_died")
    (after,) = await until_ready(bare, 1)
    assert after["pids"]["engine"] == card["pids"]["engine"]


async def test_a_budget_below_one_request_stops_the_worker_in_one_line(system: System) -> None:
    system.worker("worker", "--replicas", "4", "--kv-budget", "1", "--context-length", "1024")
    assert await system.wait("worker") == 2
    last = system.text_log("worker").splitlines()[-1]
    assert last.startswith("tokenbus: --kv-budget leaves 262144 bytes for this replica")


async def test_sigterm_drains_every_replica(system: System) -> None:
    system.router("router")
    system.worker("worker", "--replicas", "2")
    bare = await system.connect()
    await until_ready(bare, 2)
    answers = [await bare.generate(LONG | {"max_tokens": 300}) for _ in range(6)]
    for answer in answers:
        await answer.until(3)
    system.signal("worker", signal.SIGTERM)
    for answer in answers:
        assert (await answer.terminal())["finish_reason"] == "length"
    assert await system.wait("worker") == 0
    drained = [line["worker_id"] for line in system.log("worker") if line["event"] == "drained"]
    assert sorted(json.dumps(one) for one in drained) == ['"worker-1"', '"worker-2"']


def _bytes_per_token() -> int:
    from tokenbus.worker.contract.engine_settings import EngineSettings
    from tokenbus.worker.engine.gguf import model_facts
    from tokenbus.worker.files import gguf_metadata

    return model_facts.bytes_per_token(gguf_metadata.read(Path(demo.MODEL_PATH)), EngineSettings(model="demo"))
