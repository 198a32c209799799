"""More requests than the fleet can run wait in the router: in turn, fairly, and not for ever."""

import asyncio
import random
from pathlib import Path

from protocol import connection, subjects
from protocol.traces import Untraced
from router.serve import Router, RouterSettings
from tests.support.bare import PREFIX, Answer, Bare
from tests.support.load import until_idle, until_ready
from tests.support.system import System

SIM = Path("dynamo")
LONG = {"prompt": "x", "max_tokens": 100, "timeout_ms": 30_000}
"""About 0.6 s of the simulated worker."""


async def started(system: System, *router: str) -> Bare:
    system.router("router", *router)
    system.worker("worker", "--engine", "sim", "--max-num-seqs", "2", model=SIM)
    bare = await system.connect()
    await until_ready(bare, 1)
    return bare


async def fill(bare: Bare, count: int = 3) -> list[Answer]:
    """As many requests as the worker takes, two of which run."""
    answers = [await bare.generate(LONG | {"id": f"fill-{number}"}) for number in range(count)]
    await asyncio.gather(*(answer.until(2) for answer in answers[:2]))
    return answers


async def test_those_that_wait_are_told_so_and_come_to_their_turn(system: System) -> None:
    bare = await started(system)
    answers = [await bare.generate(LONG | {"max_tokens": 250}) for _ in range(8)]
    ends = await asyncio.gather(*(answer.terminal() for answer in answers))
    assert [end["usage"]["completion_tokens"] for end in ends] == [250] * 8
    assert all(len(answer.terminals) == 1 for answer in answers)
    signs = [answer.messages[0] for answer in answers if answer.messages[0]["worker_id"] is None]
    assert len(signs) >= 3
    assert all((sign["text"], sign["tokens"], sign["finish_reason"]) == ("", 0, None) for sign in signs)
    await until_idle(bare)


async def test_a_cancel_and_a_deadline_end_the_waiting_at_once(system: System) -> None:
    bare = await started(system)
    filling = await fill(bare)
    cancelled = await bare.generate(LONG | {"id": "cancelled"})
    late = await bare.generate(LONG | {"timeout_ms": 100})
    assert (await late.terminal(0.5))["error"]["code"] == "deadline_exceeded"
    reply = await bare.nats.request(f"{PREFIX}.cancel.cancelled", b"", timeout=1)
    assert reply.data == b'{"cancelled":true}'
    assert (await cancelled.terminal(0.5))["finish_reason"] == "cancelled"
    for answer in filling:
        assert (await answer.terminal())["finish_reason"] == "length"


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_again(system: System) -> None:
    bare = await started(system, "--max-queued-requests", "1")
    filling = await fill(bare)
    waits = await bare.generate(LONG)
    refused = await bare.generate(LONG)
    error = (await refused.terminal(0.5))["error"]
    assert (error["code"], error["retryable"]) == ("overloaded", True)
    assert error["retry_after_ms"] >= 100
    for answer in [*filling, waits]:
        assert (await answer.terminal())["finish_reason"] == "length"


async def test_a_tenant_with_one_request_is_not_behind_all_of_another(system: System) -> None:
    bare = await started(system)
    many = [await bare.generate(LONG, subject=f"{PREFIX}.generate.demo.many") for _ in range(12)]
    await asyncio.sleep(0)
    one = await bare.generate(LONG, subject=f"{PREFIX}.generate.demo.few")
    await one.terminal()
    assert sum(bool(answer.terminals) for answer in many) <= 7
    for answer in many:
        assert (await answer.terminal())["finish_reason"] == "length"


async def test_a_router_that_has_left_sends_nothing_more_of_what_waited(system: System) -> None:
    system.worker("worker", "--engine", "sim", "--max-num-seqs", "2", model=SIM)
    bus = await connection.connect(connection.Settings(url=system.url), name="router")
    router = Router(bus, subjects.Subjects(), "router", RouterSettings(), random.Random(1), Untraced())
    await router.open()
    watching = asyncio.create_task(router.run())
    bare = await system.connect()
    await until_ready(bare, 1)
    filling = await fill(bare)
    waits = await bare.generate(LONG | {"id": "waits"})
    await waits.until(1)
    await router.close()
    await router.leave()
    assert (await waits.terminal())["error"]["code"] == "shutting_down"
    for answer in filling:
        await answer.terminal()
    await system.until_logged("worker", "request_finished")
    await asyncio.sleep(0)
    assert len(waits.terminals) == 1
    started = [line["request_id"] for line in system.log("worker") if line["event"] == "request_started"]
    assert "default:waits" not in started
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await bus.close()
