"""Streams of real weights go on when what computes or carries them is killed, without a lost or repeated token."""

import asyncio
import os
import signal

import pytest

from tests.real.conftest import MODEL
from tests.real.reference import Reference
from tests.real.test_answers import STEPS
from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX, Answer, RawClient, check_stream
from tests.support.system import System

pytestmark = pytest.mark.long

MESSAGES = [{"role": "user", "content": "Tell me a long story about a fox who lives by a river."}]
NUM_TOKENS = 150
LOAD_S = 240.0
"""Time that several workers may take to load on a busy machine."""


async def start(system: System, *workers: str, routers: tuple[str, ...] = ("router",)) -> RawClient:
    for name in routers:
        system.router(name)
    for name in workers:
        system.worker(name, "--context-length", "2048", model=MODEL, served_name=MODEL)
    bare = await system.connect()
    await until_ready(bare, len(workers), timeout_s=LOAD_S)
    return bare


async def story(bare: RawClient) -> Answer:
    """Starts a stream, and returns it in its middle."""
    request = {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    answer = await bare.generate(request | {"return_token_ids": True}, subject=f"{PREFIX}.generate.{MODEL}")
    await answer.until(NUM_TOKENS // 4)
    assert not answer.terminals, "too fast to be killed in its middle"
    return answer


async def check(reference: Reference, *answers: Answer) -> None:
    """Waits for the ends of streams, and only then computes, which keeps this process from answering its broker."""
    await asyncio.gather(*(answer.terminal(LOAD_S) for answer in answers))
    for answer in answers:
        check_stream(answer)
        assert answer.num_tokens == NUM_TOKENS
        tokens = [token for message in answer.messages for token in message.get("token_ids") or ()]
        assert len(tokens) == NUM_TOKENS
        assert reference.regret(reference.ids_of(MESSAGES), tokens) < STEPS


def worker_of(answer: Answer) -> str:
    return str(next(message["worker_id"] for message in answer.messages if message.get("worker_id")))


async def test_a_stream_of_a_killed_worker_goes_on_elsewhere(system: System, reference: Reference) -> None:
    bare = await start(system, "worker-a", "worker-b")
    answer = await story(bare)
    system.kill(worker_of(answer))
    await check(reference, answer)
    assert len({message["worker_id"] for message in answer.messages if message.get("worker_id")}) == 2


async def test_a_stream_of_the_only_worker_waits_for_its_engine_to_load_again(
    system: System, reference: Reference
) -> None:
    bare = await start(system, "worker-a")
    answer = await story(bare)
    first = system.engine_pid("worker-a")
    os.kill(first, signal.SIGKILL)
    await check(reference, answer)
    assert system.engine_pid("worker-a") != first


async def test_a_stream_does_not_notice_that_its_router_is_killed(system: System, reference: Reference) -> None:
    bare = await start(system, "worker-a", routers=("router-a", "router-b"))
    answers = [await story(bare) for _ in range(2)]
    system.kill("router-a")
    await check(reference, *answers)


async def test_streams_survive_their_worker_and_then_a_router(system: System, reference: Reference) -> None:
    bare = await start(system, "worker-a", "worker-b", routers=("router-a", "router-b"))
    answers = [await story(bare) for _ in range(4)]
    system.kill("worker-a")
    seen = [len(answer.messages) for answer in answers]
    await asyncio.gather(*(answer.until(count + 15, LOAD_S) for answer, count in zip(answers, seen, strict=True)))
    system.kill("router-a")  # not sooner: what outlives both at once is a client that asks again (docs/guarantees.md)
    await check(reference, *answers)
