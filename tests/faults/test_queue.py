"""Requests that the fleet can't run yet wait in the router: in order, fairly, and not forever."""

import asyncio
import random
from pathlib import Path

from tests.support.exact_client import until_idle, until_ready, until_taken
from tests.support.raw_client import PREFIX, Answer, RawClient
from tests.support.system import System
from tokenbus.protocol.bus import connection
from tokenbus.protocol.telemetry.tracing import NoopTracer
from tokenbus.protocol.wire import subjects
from tokenbus.router.serve import Router
from tokenbus.router.settings import RouterSettings

SIM = Path("dynamo")
NUM_TAKEN = 3
"""Requests that a worker with two lanes accepts; one of them waits there."""
LONG = {"prompt": "x", "max_tokens": 60, "timeout_ms": 30_000}
"""Tokens for about 0.4 s of the simulated worker."""
ENDLESS = {"prompt": "x", "max_tokens": 10_000}
"""Tokens for about a minute."""


async def started(system: System, *router: str) -> RawClient:
    system.router("router", *router)
    system.worker("worker", "--engine", "sim", "--max-num-seqs", "2", model=SIM)
    bare = await system.connect()
    await until_ready(bare, 1)
    return bare


async def fill(bare: RawClient) -> list[Answer]:
    """Sends as many requests as the worker accepts, two of which run; none ends by itself."""
    answers = [await bare.generate(ENDLESS | {"id": f"fill-{number}"}) for number in range(NUM_TAKEN)]
    await asyncio.gather(*(answer.until(2) for answer in answers[:2]))
    await until_taken(bare, NUM_TAKEN)  # until then the last one may wait in the router: a worker may have been silent
    return answers


async def cancel(bare: RawClient, answers: list[Answer]) -> None:
    """Cancels the requests that fill the worker, which must all be running still."""
    assert not any(answer.terminals for answer in answers)
    for number in range(NUM_TAKEN):
        await bare.nats.publish(f"{PREFIX}.cancel.default.fill-{number}.demo", b"")
    for answer in answers:
        assert (await answer.terminal())["finish_reason"] == "cancelled"


async def test_those_that_wait_are_told_so_and_come_to_their_turn(system: System) -> None:
    bare = await started(system)
    answers = [await bare.generate(LONG | {"max_tokens": 120}) for _ in range(8)]
    ends = await asyncio.gather(*(answer.terminal() for answer in answers))
    assert [end["usage"]["completion_tokens"] for end in ends] == [120] * 8
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
    assert (await late.terminal())["error"]["code"] == "deadline_exceeded"
    reply = await bare.nats.request(f"{PREFIX}.cancel.cancelled", b"", timeout=60)
    assert reply.data == b'{"cancelled":true}'
    assert (await cancelled.terminal())["finish_reason"] == "cancelled"
    await cancel(bare, filling)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_again(system: System) -> None:
    bare = await started(system, "--max-queued-requests", "1")
    filling = await fill(bare)
    waits = await bare.generate(LONG)
    refused = await bare.generate(LONG)
    error = (await refused.terminal())["error"]
    assert (error["code"], error["retryable"]) == ("overloaded", True)
    assert error["retry_after_ms"] >= 100
    await cancel(bare, filling)
    assert (await waits.terminal())["finish_reason"] == "length"


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
    bus = await connection.connect(connection.BusSettings(url=system.url), name="router")
    router = Router(bus, subjects.Subjects(), "router", RouterSettings(), random.Random(1), NoopTracer())
    await router.open()
    watching = asyncio.create_task(router.run())
    bare = await system.connect()
    await until_ready(bare, 1)
    filling = await fill(bare)
    waits = await bare.generate(LONG | {"id": "waits"})
    await waits.until(1)
    await router.stop_intake()
    await router.shut_down()
    assert (await waits.terminal())["error"]["code"] == "shutting_down"
    await cancel(bare, filling)
    await system.until_logged("worker", "request_finished")
    await asyncio.sleep(0)
    assert len(waits.terminals) == 1
    started = [line["request_id"] for line in system.log("worker") if line["event"] == "request_started"]
    assert "default:waits" not in started
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await bus.close()
