"""One tenant attacks a fleet in every way there is, one after the other; another tenant's streams stay as they are.

Both use plain clients. The second tenant asks all the time, and its answers are compared byte for byte with those that
it got before the attacks."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.scale import times
from tests.support import hostile_constraints, poisoned_model
from tests.support.exact_client import NEAR_TIE, cards, until_ready
from tests.support.raw_client import PREFIX, Answer, RawClient
from tests.support.system import System

ANIMALS = ("fox", "cat", "dog", "bear", "mouse", "owl")
STREAMS = times(2, 6)
WORKERS = ("w-1", "w-2")

Request = dict[str, Any]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[System]:
    """Two routers and two workers with an adapter of the attacker's that makes all numbers overflow."""
    system = await System.start(tmp_path)
    overflow = poisoned_model.write_overflowing(tmp_path / "overflow.gguf")
    for name in ("r-1", "r-2"):
        system.router(name)
    flags = ("--max-num-seqs", "16", "--host-cache-mib", "64", "--flash-attention", "off")
    for name in WORKERS:
        system.worker(name, "--lora", f"overflow={overflow}@mallory", *flags)
    yield system
    await system.stop()


class Victim:
    """A tenant that asks for known answers all the time."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self._expected: dict[str, Answer] = {}
        self.num_answers = 0
        self.faults: list[str] = []

    async def learn(self) -> None:
        """Asks for each answer once, beside nothing else."""
        for animal in ANIMALS:
            self._expected[animal] = await self._ask(animal)

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Asks in several streams at a time, and ends them after at least one more answer each."""
        is_over = asyncio.Event()
        tasks = [asyncio.create_task(self._ask_until(is_over, at)) for at in range(STREAMS)]
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*tasks)

    async def _ask_until(self, is_over: asyncio.Event, at: int) -> None:
        for animal in itertools.islice(itertools.cycle(ANIMALS), at, None):
            was_over = is_over.is_set()
            self._compare(animal, await self._ask(animal))
            if was_over:
                return

    async def _ask(self, animal: str) -> Answer:
        prompt = f"Once upon a time there was a {animal}"
        request = {"prompt": prompt, "max_tokens": times(24, 48), "temperature": 0, "ignore_eos": True, "logprobs": 2}
        return await self._client.ask(request, subject=f"{PREFIX}.generate.demo.acme")

    def _compare(self, animal: str, answer: Answer) -> None:
        self.num_answers += 1
        expected = self._expected[animal]
        terminal = answer.terminals[0]
        if terminal["finish_reason"] != "length":
            self.faults.append(f"{animal}: {terminal}")
        elif answer.flaws != (0, 0) or len(answer.terminals) != 1:
            self.faults.append(f"{animal}: {answer.flaws}, {len(answer.terminals)} terminals")
        elif answer.text != expected.text and _lead_at_parting(expected, answer) > NEAR_TIE:
            self.faults.append(f"{animal}: {answer.text!r} instead of {expected.text!r}")


def _logprobs(answer: Answer) -> list[dict[str, Any]]:
    return [one for message in answer.messages for one in message.get("logprobs", [])]


def _lead_at_parting(expected: Answer, answer: Answer) -> float:
    """Returns by how much the expected token led where two answers part: rounding decides between near ties."""
    for one, other in zip(_logprobs(expected), _logprobs(answer), strict=False):
        if one["id"] != other["id"]:
            first, second = (top["logprob"] for top in one["top"][:2])
            return float(first - second)
    return 0.0


class Attacker:
    """A tenant that means harm, and expects one terminal for whatever it sends."""

    def __init__(self, client: RawClient, system: System) -> None:
        self.client = client
        self.system = system

    async def send(self, *requests: Request, timeout_s: float = 120.0) -> list[Answer]:
        """Sends requests at once; returns their answers once each has its terminal."""
        subject = f"{PREFIX}.generate.demo.mallory"
        answers = [await self.client.generate(request, subject=subject) for request in requests]
        for answer in answers:
            await answer.terminal(timeout_s)
        return answers


async def poison(attacker: Attacker) -> None:
    request = {"temperature": 0, "max_tokens": 20, "lora": [{"name": "overflow"}]}
    for size in (1, 40, 300):
        prompts = [f"{number} " + "Once upon a time " * size for number in range(4)]
        answers = await attacker.send(*(request | {"prompt": prompt} for prompt in prompts))
        assert {answer.terminals[0]["error"]["code"] for answer in answers} == {"internal"}


async def constrain(attacker: Attacker) -> None:
    lark = "start: A\nA: /" + ".?" * 15_000 + "/"
    regexes = ["(a?){4000}" * 2, "(.{1,1000}){1,1000}", "([ab]*c){500}|" * 30 + "d", ".?" * 8_000]
    fields: list[Request] = [{"grammar": lark}, *({"regex": regex} for regex in regexes[: times(1, 4)])]
    schemas = list(hostile_constraints.SCHEMAS.values())[:: 8 if times(1, 2) == 1 else 1]
    fields += [{"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}} for schema in schemas]
    await attacker.send(*({"prompt": "Hi", "max_tokens": 20} | one for one in fields))


async def salt(attacker: Attacker) -> None:
    count = times(50, 5_000)
    for start in range(0, count, 50):
        await attacker.send(
            *({"prompt": "Once upon a time", "max_tokens": 1, "cache_salt": f"s{start + n}"} for n in range(50))
        )


async def resync(attacker: Attacker) -> None:
    nats = attacker.client.nats
    for offset in (-1, 1 << 62, "x", None, 1.5):
        for subject in ("cancel", "resync"):
            for request_id in ("anything", "acme:anything"):
                payload = json.dumps({"offset": offset}).encode()
                await nats.publish(f"{PREFIX}.{subject}.mallory.{request_id}", payload, reply=nats.new_inbox())


async def upload_twice(attacker: Attacker) -> None:
    nats = attacker.client.nats
    body = json.dumps({"prompt": "Hello", "max_tokens": 4, "stop": ["\0" * 1_000]}).encode()
    subject = f"{PREFIX}.generate.demo.mallory"
    said = await nats.request(subject, b"", timeout=5, headers={"Tokenbus-Size": str(len(body))})
    upload = json.loads(said.data)["upload"]
    answer, inbox = Answer(), nats.new_inbox()

    async def take(message: Any) -> None:
        answer.take(message, msgpack=False)

    await nats.subscribe(inbox, cb=take)
    for _ in range(2):
        await nats.publish(upload, body, reply=inbox, headers={"Tokenbus-Offset": "0"})
    await answer.terminal()
    await nats.request(f"{PREFIX}.models", b"", timeout=5)  # whatever comes after the terminal is here by now
    assert len(answer.terminals) == 1


async def overload(attacker: Attacker) -> None:
    await attacker.send(*({"prompt": "Once upon a time", "max_tokens": 8} for _ in range(times(50, 2_000))))


async def converse(attacker: Attacker) -> None:
    turns = [{"role": "user", "content": "x" * 300} for _ in range(times(1_000, 3_000))]
    await attacker.send(*({"messages": turns, "max_tokens": 4} for _ in range(4)))


async def kill_an_engine(attacker: Attacker) -> None:
    running = asyncio.create_task(poison(attacker))
    (card, *_) = [card for card in await cards(attacker.client) if card["worker_id"] == WORKERS[0]]
    os.kill(card["pids"]["engine"], signal.SIGKILL)
    await running


async def kill_a_worker(attacker: Attacker) -> None:
    attacker.system.kill(WORKERS[1])


ATTACKS: tuple[Callable[[Attacker], Awaitable[None]], ...] = (
    poison,
    constrain,
    salt,
    resync,
    upload_twice,
    overload,
    converse,
    kill_an_engine,
    kill_a_worker,
    poison,
)


@pytest.mark.long
async def test_no_attack_of_one_tenant_changes_a_byte_of_another_ones_answers(fleet: System) -> None:
    victim = Victim(await fleet.connect())
    attacker = Attacker(await fleet.connect(), fleet)
    await until_ready(attacker.client, len(WORKERS))
    await victim.learn()
    for attack in ATTACKS:
        before = victim.num_answers
        async with victim.asking():
            await attack(attacker)
        assert not victim.faults, (attack.__name__, len(victim.faults), victim.num_answers - before, victim.faults[:3])
