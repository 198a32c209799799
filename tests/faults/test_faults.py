"""When processes are killed, clients see exactly one terminal for every accepted request."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX, Answer, RawClient, check_stream
from tests.support.system import System
from tokenbus.client.wire.resync_timer import MAX_SILENCE_S

STEADY = Path("steps-of-50ms")
LONG = {"prompt": "Once upon a time", "max_tokens": 600, "ignore_eos": True, "temperature": 0}


async def speaking(bare: RawClient, count: int, **more: object) -> list[Answer]:
    """Starts streams and waits until each has sent tokens."""
    answers = [await bare.generate(LONG | more) for _ in range(count)]
    for answer in answers:
        await answer.until(3)
    return answers


async def test_streams_go_on_exactly_when_their_engine_is_killed_with_9(system: System) -> None:
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    exact = {"seed": 7, "temperature": 1.0, "max_tokens": 300}
    calm = await bare.ask(LONG | exact)
    answers = await speaking(bare, 4, **exact)
    os.kill(card["pids"]["engine"], signal.SIGKILL)
    for answer in answers:
        terminal = await answer.terminal(timeout_s=60)
        assert terminal["finish_reason"] == "length", terminal
        assert terminal["usage"]["completion_tokens"] == 300
        assert {message["attempt"] for message in answer.messages} == {1}
        check_stream(answer)
    assert len({answer.text for answer in (*answers, calm)}) <= 3  # near ties may fall otherwise in other batches
    (after,) = await until_ready(bare, 1)
    assert after["epoch"] == card["epoch"]
    assert after["pids"]["front"] == card["pids"]["front"]
    assert after["pids"]["engine"] != card["pids"]["engine"]
    answer = await bare.ask({"prompt": "12 + 30 =", "max_tokens": 3, "temperature": 0})
    assert answer.text == " 42"
    assert all(len(answer.terminals) == 1 for answer in answers)


async def test_while_an_engine_restarts_its_requests_go_to_the_other_worker(system: System) -> None:
    system.router("router")
    system.worker("worker-a")
    system.worker("worker-b")
    bare = await system.connect()
    found = await until_ready(bare, 2)
    os.kill(found[0]["pids"]["engine"], signal.SIGKILL)
    for _ in range(20):
        answer = await bare.ask({"prompt": "12 + 30 =", "max_tokens": 3, "temperature": 0})
        assert answer.text == " 42", answer.messages


@pytest.mark.long
async def test_sigterm_under_load_cuts_no_stream_even_if_the_next_worker_is_yet_to_start(system: System) -> None:
    system.router("router")
    system.worker("worker", "--grace-s", "0.3")
    bare = await system.connect()
    await until_ready(bare, 1)
    short = {"max_tokens": 5}
    begun = await speaking(bare, 12)
    waiting = [await bare.generate(LONG | short) for _ in range(30)]
    system.signal("worker", signal.SIGTERM)
    assert await system.wait("worker") == 0
    system.worker("next")
    for answer in begun:
        assert (await answer.terminal())["finish_reason"] == "length"
        assert len(answer.terminals) == 1
        assert sum(message["tokens"] for message in answer.messages) == LONG["max_tokens"]
    for answer in waiting:
        terminal = await answer.terminal()
        if terminal["finish_reason"] == "error":
            assert terminal["error"]["code"] in ("shutting_down", "no_worker"), terminal
        assert len(answer.terminals) == 1
    lines = system.log("worker")
    started = [line["request_id"] for line in lines if line["event"] == "request_started"]
    finished = [line["request_id"] for line in lines if line["event"] == "request_finished"]
    assert sorted(started) == sorted(finished)
    assert len(set(finished)) == len(finished)


async def test_sigterm_lets_short_requests_finish(system: System) -> None:
    system.router("router")
    system.worker("worker", "--grace-s", "30")
    bare = await system.connect()
    await until_ready(bare, 1)
    answers = await speaking(bare, 4, max_tokens=200)
    system.signal("worker", signal.SIGTERM)
    for answer in answers:
        assert (await answer.terminal())["finish_reason"] == "length"
        check_stream(answer)
    late = await bare.ask({"prompt": "x"})
    assert late.messages[-1]["error"]["code"] in ("no_worker", "shutting_down")
    assert await system.wait("worker") == 0


async def test_streams_of_the_only_worker_go_on_when_it_is_started_again(system: System) -> None:
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    await until_ready(bare, 1)
    calm = await bare.ask(LONG)
    answers = await speaking(bare, 2)
    system.signal("worker", signal.SIGKILL)
    await system.wait("worker")
    system.worker("worker")
    for answer in answers:
        terminal = await answer.terminal()
        assert terminal["finish_reason"] == "length", terminal
        assert terminal["attempt"] == 2
        assert terminal["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert len({answer.text for answer in (*answers, calm)}) <= 3  # near ties may fall otherwise in other batches


async def test_streams_of_a_killed_worker_go_on_elsewhere_while_its_successor_of_the_same_name_loads(
    system: System,
) -> None:
    simulated = ("--engine", "sim", "--sim-speedup", "5")
    system.router("router")
    for name in ("worker-a", "worker-b"):
        system.worker(name, *simulated, model=STEADY)
    bare = await system.connect()
    for card in await until_ready(bare, 2):
        assert card["epoch"] == card["process_run"], "a start needs no second epoch"
    answers = await speaking(bare, 4)
    killed = answers[0].messages[0]["worker_id"]
    system.signal(killed, signal.SIGKILL)
    await system.wait(killed)
    system.worker(killed, *simulated, "--sim-faults", "load@600000", model=STEADY)
    await system.until_logged(killed, "model_loading")
    for answer in answers:
        terminal = await answer.terminal(timeout_s=60)
        assert terminal["finish_reason"] == "length", terminal
        assert terminal["worker_id"] != killed
        check_stream(answer)
    assert answers[0].terminals[0]["attempt"] == 2
    (lost,) = system.logged("router", "worker_lost")
    assert lost["reason"] == "disconnected", "the broker told the router"


async def test_streams_that_no_worker_continues_end_in_worker_lost_before_their_client_would_ask(
    system: System,
) -> None:
    system.router("router", "--patience-s", "1")
    system.worker("worker")
    bare = await system.connect()
    await until_ready(bare, 1)
    answers = await speaking(bare, 4)
    system.signal("worker", signal.SIGKILL)
    killed_at = time.monotonic()
    for answer in answers:
        terminal = await answer.terminal()
        assert terminal["error"]["code"] == "worker_lost"
        assert terminal["worker_id"] is None
        assert terminal["usage"]["completion_tokens"] == sum(message["tokens"] for message in answer.messages)
    assert time.monotonic() - killed_at < MAX_SILENCE_S


async def test_a_killed_front_takes_its_engine_with_it(system: System) -> None:
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    engine = os.pidfd_open(card["pids"]["engine"])
    system.signal("worker", signal.SIGKILL)
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(engine, gone.set)
    async with asyncio.timeout(60):
        await gone.wait()
    asyncio.get_running_loop().remove_reader(engine)
    os.close(engine)


async def test_running_streams_do_not_notice_the_death_of_their_router(system: System) -> None:
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    await until_ready(bare, 1)
    answers = await speaking(bare, 4, max_tokens=600)
    system.signal("router", signal.SIGKILL)
    await system.wait("router")
    system.router("router-2")
    for answer in answers:
        assert (await answer.terminal())["finish_reason"] == "length"
        check_stream(answer)
    await until_ready(bare, 1)
    assert (await bare.ask({"prompt": "12 + 30 =", "max_tokens": 3, "temperature": 0})).text == " 42"


async def test_sigterm_of_a_router_hands_new_requests_to_the_other(system: System) -> None:
    system.router("router-a")
    system.router("router-b")
    system.worker("worker")
    bare = await system.connect()
    await until_ready(bare, 1)
    for name in ("router-a", "router-b"):
        await system.until_logged(name, "router_ready")
    for number in range(40):
        if number == 10:
            system.signal("router-a", signal.SIGTERM)
        answer = await bare.ask({"prompt": "12 + 30 =", "max_tokens": 3, "temperature": 0})
        assert answer.text == " 42", answer.messages
    assert await system.wait("router-a") == 0


async def test_each_request_has_one_start_and_one_terminal_line_in_router_and_worker(system: System) -> None:
    system.router("router")
    system.worker("worker")
    bare = await system.connect()
    await until_ready(bare, 1)
    for number in range(5):
        await bare.ask({"id": f"line-{number}", "prompt": "hello", "max_tokens": 4})
    system.signal("worker", signal.SIGTERM)
    system.signal("router", signal.SIGTERM)
    for name, first in (("worker", "request_started"), ("router", "request_received")):
        assert await system.wait(name) == 0
        lines = system.log(name)
        for event in (first, "request_finished"):
            ids = [line["request_id"] for line in lines if line["event"] == event]
            assert sorted(str(one) for one in ids) == [f"default:line-{number}" for number in range(5)], (name, event)
        assert "hello" not in system.text_log(name)


async def test_a_worker_that_cannot_serve_its_model_says_why_in_one_line(system: System) -> None:
    system.worker("missing", model=Path("/nowhere/model.gguf"))
    assert await system.wait("missing") == 1
    assert system.text_log("missing").splitlines()[-1] == (
        "tokenbus: /nowhere/model.gguf: there is no such file; name a GGUF file, or a model on the Hub as org/repo"
    )


@pytest.mark.long
async def test_a_storm_of_requests_cancels_and_a_killed_engine_leaves_nothing_behind(system: System) -> None:
    system.router("router")
    system.worker("worker-a")
    system.worker("worker-b")
    bare = await system.connect()
    found = await until_ready(bare, 2)
    rng = random.Random(7)
    answers = []
    for number in range(150):
        body = LONG | {"id": f"storm-{number}", "max_tokens": rng.randint(1, 150), "stream": rng.random() < 0.8}
        answers.append(await bare.generate(body | ({"timeout_ms": 50} if rng.random() < 0.1 else {})))
        if rng.random() < 0.3:
            await bare.nats.publish(f"{PREFIX}.cancel.storm-{rng.randrange(number + 1)}", b"")
        if number == 70:
            os.kill(found[0]["pids"]["engine"], signal.SIGKILL)
    ends = [await answer.terminal(60) for answer in answers]
    allowed = {"worker_lost", "deadline_exceeded", "overloaded", "no_worker", "engine_poisoned"}
    assert {end["error"]["code"] for end in ends if end["finish_reason"] == "error"} <= allowed
    assert {"length", "cancelled", "error"} <= {end["finish_reason"] for end in ends}
    async with asyncio.timeout(60):
        while any(card["load"]["running"] + card["load"]["waiting"] for card in await until_ready(bare, 2)):
            pass
    assert all(len(answer.terminals) == 1 for answer in answers)
    for name, first in (
        ("worker-a", "request_started"),
        ("worker-b", "request_started"),
        ("router", "request_received"),
    ):
        system.signal(name, signal.SIGTERM)
        assert await system.wait(name) == 0
        began, ended = (
            [line["request_id"] for line in system.log(name) if line["event"] == event]
            for event in (first, "request_finished")
        )
        assert sorted(map(str, began)) == sorted(map(str, ended)), name
        assert not [line for line in system.log(name) if line["event"] in ("message_failed", "request_failed")]
