"""A client gets each log probability of its prompt, although the worker that computed them is killed meanwhile."""

import asyncio
import signal
from typing import Any

import pytest

from tests.support.exact_client import until_ready
from tests.support.raw_client import Answer
from tests.support.system import System

MOST = 0.5
"""Far more than what the other sequences of a step change, and far less than what another position's would be off."""
ASKED: dict[str, Any] = {
    "prompt": "12 + 30 = 42. The capital of Borland is Teska. " * 55,
    "prompt_logprobs": 3,
    "max_tokens": 4,
    "temperature": 0,
    "cache_prompt": False,
}


def scores_of(answer: Answer) -> list[dict[str, Any]]:
    """The log probabilities by position, as a client takes them that skips what a later attempt repeats."""
    found: list[dict[str, Any]] = []
    for message in answer.messages:
        start = message.get("prompt_offset", 0)
        new = message.get("prompt_logprobs", [])
        assert start <= len(found) or not new, (start, len(found))
        found += new[max(0, len(found) - start) :]
    return found


async def until_scored(answer: Answer, count: int) -> None:
    """Waits until the log probabilities of so many tokens have come."""
    number = 1
    while len(scores_of(answer)) < count:
        await answer.until(number)
        number = len(answer.messages) + 1
        assert not answer.terminals, "it was faster"


@pytest.mark.long
async def test_a_prompt_is_scored_whole_though_its_worker_is_killed_meanwhile(system: System) -> None:
    system.router("router")
    for name in ("worker-a", "worker-b"):
        system.worker(name, "--max-num-batched-tokens", "32")
    bare = await system.connect()
    await until_ready(bare, 2)
    calm = await bare.ask(ASKED)
    expected = scores_of(calm)
    assert len(expected) == calm.terminals[0]["usage"]["prompt_tokens"]
    cut = [await bare.generate(ASKED) for _ in range(4)]
    await asyncio.gather(*(until_scored(answer, 100) for answer in cut))
    victim = next(str(message["worker_id"]) for message in cut[0].messages if message.get("worker_id"))
    system.signal(victim, signal.SIGKILL)
    for answer in cut:
        terminal = await answer.terminal()
        assert terminal["finish_reason"] == "length"
        found = scores_of(answer)
        assert [one["id"] for one in found] == [one["id"] for one in expected]
        assert found[0]["logprob"] is None
        scores = [one["logprob"] for one in found[1:]]
        differences = [abs(one - other["logprob"]) for one, other in zip(scores, expected[1:], strict=True)]
        assert max(differences) < MOST
        assert sum(differences) / len(differences) < MOST / 50
        assert answer.text == calm.text
    assert {answer.terminals[0]["attempt"] for answer in cut} == {1, 2}
