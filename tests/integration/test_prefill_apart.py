"""Prompts apart from streams: whatever dies, a request has one terminal and the tokens that it would have had."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX, Answer, Message, RawClient
from tests.support.system import System

TIMING = "cpu-0.5b-q8_0"
FLAGS = ("--engine", "sim", "--sim-speedup", "8", "--host-cache-mib", "64", "--step-target-ms", "60")
PROMPT = [7 + (13 * place + place * place) % 400 for place in range(1_605)]
TAKEN = 1_604
"""All but the last token come from the worker that has computed the prompt."""


class Fleet:
    """A router, a prefill worker, and decode workers."""

    def __init__(self, system: System, bare: RawClient) -> None:
        self.system = system
        self.bare = bare
        self._numbers = itertools.count()

    def start(self, **roles: str) -> None:
        for name, role in roles.items():
            self.system.worker(name, *FLAGS, "--role", role, model=TIMING)

    def body(self, **fields: object) -> Message:
        request_id = f"r-{next(self._numbers)}"
        same = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0, "return_token_ids": True}
        return {"id": request_id, "token_ids": PROMPT, **same, **fields}

    async def generate(self, **fields: object) -> Answer:
        return await self.bare.generate(self.body(**fields))

    async def ask(self, **fields: object) -> Answer:
        return await self.bare.ask(self.body(**fields))

    async def remote_prefill_of(self, number: int, worker: str = "p") -> dict[str, object]:
        """Waits for the end of a request's remote prefill, and returns its line of the log."""
        async with asyncio.timeout(60):
            while True:
                for line in self.system.log(worker):
                    if line["event"] == "remote_prefill_ended" and line["request_id"] == f"default:r-{number}":
                        return line
                await asyncio.sleep(0.02)

    async def until_remote_prefill(self) -> None:
        """Waits until the prefill worker has computed some blocks."""
        async with asyncio.timeout(60):
            while not any(card["load"]["computed_tokens"] for card in await self._cards("p")):
                await asyncio.sleep(0.02)

    async def _cards(self, name: str) -> list[Message]:
        return [card for card in await until_ready(self.bare, 1) if card["worker_id"] == name]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    system = await System.start(tmp_path)
    system.router("router")
    fleet = Fleet(system, await system.connect())
    fleet.start(p="prefill", d="decode")
    await until_ready(fleet.bare, 2)
    yield fleet
    await system.stop()


def token_ids(answer: Answer) -> list[int]:
    return [token for message in answer.messages for token in message.get("token_ids", ())]


def check(answer: Answer, expected: Answer) -> Message:
    """Checks that an answer is whole, and returns its terminal."""
    (terminal,) = answer.terminals
    assert terminal["finish_reason"] == "length"
    assert token_ids(answer) == token_ids(expected)
    return terminal


async def alone(fleet: Fleet) -> Answer:
    """Returns the answer of a worker that computes everything itself, in a cache of its own."""
    return await fleet.ask(cache_prompt=False)


async def test_the_prompt_is_computed_at_one_worker_and_the_answer_at_the_other(fleet: Fleet) -> None:
    expected = await alone(fleet)
    answer = await fleet.ask(routing={"explain": True})
    terminal = check(answer, expected)
    assert (terminal["worker_id"], terminal["routing"]["fetch_from"], terminal["routing"]["has_leg"]) == (
        "d",
        "p",
        True,
    )
    assert (terminal["usage"]["cached_tokens"], terminal["timings"]["fetched_tokens"]) == (TAKEN, TAKEN)
    assert (await fleet.remote_prefill_of(1))["outcome"] == "complete"


async def test_a_request_that_must_not_be_cached_and_a_short_one_have_no_remote_prefill(fleet: Fleet) -> None:
    for fields in ({"cache_prompt": False}, {"token_ids": PROMPT[:500]}):
        answer = await fleet.ask(routing={"explain": True}, **fields)
        assert (answer.terminals[0]["worker_id"], answer.terminals[0]["routing"]["has_leg"]) == ("d", False)
    assert not [line for line in fleet.system.log("p") if line["event"] == "remote_prefill_ended"]


async def test_a_prefill_worker_killed_in_the_middle_costs_time_only(fleet: Fleet) -> None:
    expected = await alone(fleet)
    answer = await fleet.generate()
    await fleet.until_remote_prefill()
    fleet.system.kill("p")
    await answer.terminal()
    assert check(answer, expected)["worker_id"] == "d"


async def test_a_decode_worker_killed_in_the_middle_is_followed_by_another(fleet: Fleet) -> None:
    expected = await alone(fleet)
    answer = await fleet.generate()
    await fleet.until_remote_prefill()
    fleet.start(e="decode")
    fleet.system.kill("d")
    await answer.terminal()
    assert check(answer, expected)["worker_id"] in ("e", "p")  # another one if it was up by then


async def test_a_router_killed_in_the_middle_ends_neither_the_remote_prefill_nor_the_stream(fleet: Fleet) -> None:
    expected = await alone(fleet)
    answer = await fleet.generate()
    await fleet.until_remote_prefill()
    fleet.system.kill("router")
    await answer.terminal()
    check(answer, expected)
    assert (await fleet.remote_prefill_of(1))["outcome"] == "complete"


async def test_a_cancel_ends_both(fleet: Fleet) -> None:
    answer = await fleet.generate()
    await fleet.until_remote_prefill()
    await fleet.bare.nats.request(f"{PREFIX}.cancel.r-0", b"{}", timeout=5)
    assert (await answer.terminal())["finish_reason"] == "cancelled"
    assert (await fleet.remote_prefill_of(0))["outcome"] == "cancelled"
    assert len(answer.terminals) == 1


async def test_a_prefill_worker_that_drains_finishes_what_it_computes(fleet: Fleet) -> None:
    answer = await fleet.generate()
    await fleet.until_remote_prefill()
    fleet.system.signal("p", signal.SIGTERM)
    assert (await answer.terminal())["finish_reason"] == "length"
    assert (await fleet.remote_prefill_of(0))["outcome"] == "complete"
    assert await fleet.system.wait("p") == 0


async def test_prefill_workers_alone_serve(fleet: Fleet) -> None:
    fleet.system.signal("d", signal.SIGTERM)
    assert await fleet.system.wait("d") == 0
    answer = await fleet.ask()
    assert (answer.terminals[0]["finish_reason"], answer.terminals[0]["worker_id"]) == ("length", "p")
