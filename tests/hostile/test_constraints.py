"""Constraints that would take minutes and gigabytes are refused, and other tenants hardly notice."""

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack

import pytest

from tests.hostile.scale import IS_LONG, times
from tests.support.exact_client import until_ready
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire.errors import RequestError

ATTACKS = {
    "a regex of 8,000 optional characters": {"regex": ".?" * 8_000},
    "a terminal of 15,000 optional characters": {"grammar": f"start: A\nA: /{'.?' * 15_000}/"},
    "a terminal of a thousand intersections": {
        "grammar": "start: A\nA: " + " & ".join(f"/.*{chr(97 + n % 26)}.*{n}.*/" for n in range(1_000))
    },
    "a short and ambiguous grammar": {
        "grammar": "T0: /ccccyyy{50}(((xxxx))*?|[ab]|cccc)?/\n"
        'start: b+ T0+ b* "x"{1,99} | T0? "x"{1,99} | "x"* T0+ | T0\nb[lazy]: T0'
    },
    "a schema with a pattern of optional characters": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "string", "pattern": f"^{'.?' * 15_000}$"}},
        }
    },
}
"""None of these is small, and all of them were once compiled on the engine's one thread for constraints."""
SMALL = {"prompt": "12 + 30 =", "regex": " [0-9]{1,3}", "temperature": 0}
WAIT_S = 0.5 * float(os.environ.get("TOKENBUS_TEST_PATIENCE", "8"))
"""On a quiet machine nobody waits longer than 0.5 s; this one may be busy with other tests."""


@pytest.fixture
async def served(system: System) -> System:
    system.router("router")
    system.worker("worker", "--step-timeout-s", "5")
    await until_ready(await system.connect(), 1)
    return system


async def ask(client: WireClient, body: dict[str, object]) -> str:
    fields = {"prompt": "x", "max_tokens": 40, "temperature": 0} | body  # answers are compared
    return "".join([chunk.text async for chunk in client.generate("demo", **fields)])  # type: ignore[arg-type]


async def refused(client: WireClient, body: dict[str, object]) -> str:
    """The text that came, or the code and field of the refusal."""
    try:
        return f"answered {await ask(client, body)}"
    except RequestError as error:
        return f"{error.error.code} {error.error.param}"


@pytest.mark.long
async def test_hostile_tenants_get_refusals_or_answers_and_delay_another_ones_small_regex_by_a_moment(
    served: System,
) -> None:
    bare = await served.connect()
    story = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    told = (await bare.ask(story)).text
    num_hostile = times(5, 10)
    async with AsyncExitStack() as clients:
        hostile = [
            await clients.enter_async_context(await WireClient.connect(served.url, tenant=f"hostile{n}"))
            for n in range(num_hostile)
        ]
        other = await clients.enter_async_context(await WireClient.connect(served.url, tenant="other"))
        expected = await ask(other, SMALL)
        await refused(hostile[0], {"grammar": 'root ::= "a"'})  # starts the process out of which the others fork
        for turn in range(times(1, 10)):
            attacks = [
                asyncio.create_task(refused(hostile[n], vary(attack, f"{turn}-{n}")))
                for n in range(num_hostile)
                for attack in list(ATTACKS.values())[n % 5 : None if IS_LONG else n % 5 + 1]
            ]
            waits = []
            while not all(attack.done() for attack in attacks):
                began = time.monotonic()
                assert await ask(other, SMALL) == expected
                waits.append(time.monotonic() - began)
                assert (await bare.ask(story)).text == told
            print(
                f"waited {max(waits):.3f} s at most, {sorted(waits)[len(waits) // 2]:.3f} s mostly, {len(waits)} times"
            )
            assert max(waits) < WAIT_S
            found = [attack.result() for attack in attacks]
            assert all(one.startswith(("answered", "invalid_request")) for one in found), found
        assert await refused(hostile[0], vary(ATTACKS["a regex of 8,000 optional characters"], f"{turn}-0")) == found[0]
    assert num_engines(served) == 1


def num_engines(served: System) -> int:
    return [line["event"] for line in served.log("worker")].count("engine_ready")


def vary(attack: dict[str, object], name: str) -> dict[str, object]:
    """The same attack for which no refusal is remembered."""
    letters = "".join(chr(97 + int(digit)) for digit in name if digit.isdigit())
    if "regex" in attack:
        return {"regex": f"{attack['regex']}"[: -2 * len(letters)] + letters}
    if "grammar" in attack:
        return {"grammar": f'{attack["grammar"]}\nZ: "{letters}"'}
    return attack


async def test_a_cancelled_one_ends_its_work(served: System) -> None:
    before = set(served.family("worker"))
    async with await WireClient.connect(served.url, tenant="hostile") as client:
        task = asyncio.create_task(refused(client, ATTACKS["a terminal of 15,000 optional characters"]))
        while len(set(served.family("worker")) - before) < 2:  # the nursery, and the process that compiles
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(60):
            while len(set(served.family("worker")) - before) > 1:
                await asyncio.sleep(0.01)
        assert (await refused(client, SMALL)).startswith("answered")


async def test_one_whose_process_stands_still_or_dies_harms_only_its_own_request(served: System) -> None:
    bare = await served.connect()
    before = set(served.family("worker"))
    letters = {"prompt": "x", "grammar": "root ::= [a-z ]{100000}", "max_tokens": 1_900, "temperature": 1, "seed": 3}
    answer = await bare.generate(letters)
    await answer.until(3)
    processes = set(served.family("worker")) - before
    assert processes, "it is followed in a process of its own"
    for process_id in processes:
        os.kill(process_id, signal.SIGSTOP)
    for _ in range(5):
        whole = await bare.ask({"prompt": "Once upon a time", "max_tokens": 50, "ignore_eos": True})
        assert whole.messages[-1]["finish_reason"] == "length"
    assert not answer.terminals
    for process_id in processes:
        os.kill(process_id, signal.SIGKILL)
    terminal = await answer.terminal()
    assert (terminal["error"]["code"], terminal["error"]["param"]) == ("invalid_request", "grammar")
    assert (await bare.ask({"prompt": "x", "grammar": 'root ::= "abc"'})).text == "abc", "there is another nursery"
    assert num_engines(served) == 1
