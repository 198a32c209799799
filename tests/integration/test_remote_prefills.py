"""A worker has a prompt computed by another one, and computes it itself where that comes to nothing."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.run_sender import RunSender
from tests.support.system import System
from tokenbus.protocol.wire import codec, internal, messages

SIZE = 16
TIMING = "cpu-0.5b-q8_0"
FLAGS = ("--engine", "sim", "--sim-speedup", "8", "--host-cache-mib", "64", "--step-target-ms", "60")
REMOTE_PREFILL_MS = 5_000.0
"""More than a prompt takes here."""


def prompt(number: int, length: int = 1_500) -> list[int]:
    return [7 + (31 * number + 13 * place + place * place) % 400 for place in range(length)]


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    for name, role in (("p", "prefill"), ("d", "decode")):
        system.worker(name, *FLAGS, "--role", role, model=TIMING)
    yield system
    await system.stop()


@pytest.fixture
async def sender(system: System) -> RunSender:
    sender = RunSender((await system.connect()).nats)
    await sender.open("p", "d")
    return sender


def remote_prefill(sender: RunSender, leg_ms: float = REMOTE_PREFILL_MS) -> internal.FetchSource:
    return codec.replace(sender.source("p"), leg_ms=leg_ms)


def cached(chunk: messages.Chunk) -> tuple[int, object]:
    """Returns the prompt's tokens that were cached, and those of them that another worker gave."""
    assert isinstance(chunk.usage, messages.Usage)
    assert isinstance(chunk.timings, messages.Timings)
    return chunk.usage.cached_tokens, chunk.timings.fetched_tokens


async def test_cards_say_which_role_a_worker_has(sender: RunSender) -> None:
    assert {name: card.role for name, card in sender.cards.items()} == {"p": "prefill", "d": "decode"}


async def test_a_prompt_is_computed_by_the_other_worker_and_its_answer_is_the_same(
    system: System, sender: RunSender
) -> None:
    token_ids = prompt(1)
    taken, filled = len(token_ids) - 1, -(-len(token_ids) // SIZE) * SIZE
    expected = await sender.ask("d", token_ids, cache_salt="apart")
    answer = await sender.ask("d", token_ids, fetch_from=remote_prefill(sender))
    assert cached(answer.terminals[0]) == (taken, taken)
    assert answer.token_ids == expected.token_ids
    told = await sender.until_fetched(1)
    assert (told.worker_id, told.was_leg, told.fetched_tokens) == ("p", True, filled)
    (ended,) = [line for line in system.log("p") if line["event"] == "remote_prefill_ended"]
    assert (ended["outcome"], ended["tokens"], ended["request_id"]) == ("complete", filled, "default:r-1")
    # it stays cached at both
    assert cached((await sender.ask("p", [*token_ids, 9])).terminals[0])[0] >= taken
    assert cached((await sender.ask("d", [*token_ids, 9])).terminals[0])[0] >= taken


async def test_a_cancel_ends_the_remote_prefill_too(system: System, sender: RunSender) -> None:
    streamed = await sender.run("d", prompt(2, 8_000), fetch_from=remote_prefill(sender))
    await sender.until_remote_prefill(1)
    await sender.cancel("d", "r-0")
    assert (await streamed.terminal()).finish_reason == "cancelled"
    await system.until_logged("p", "remote_prefill_ended")
    (ended,) = [line for line in system.log("p") if line["event"] == "remote_prefill_ended"]
    assert ended["outcome"] == "cancelled"
    assert len(streamed.terminals) == 1


async def test_a_decode_worker_that_dies_leaves_the_remote_prefill_to_its_lease(
    system: System, sender: RunSender
) -> None:
    await sender.run("d", prompt(3, 8_000), fetch_from=remote_prefill(sender))
    await sender.until_stored("p", 10)
    system.kill("d")
    await system.until_logged("p", "remote_prefill_ended")
    (ended,) = [line for line in system.log("p") if line["event"] == "remote_prefill_ended"]
    assert ended["outcome"] == "cancelled"
    answer = await sender.ask("p", prompt(3, 8_000))
    assert answer.terminals[0].finish_reason == "length"
    assert cached(answer.terminals[0])[0] > 0


async def test_a_prefill_worker_that_is_killed_in_the_middle_costs_the_rest_of_the_prompt(
    system: System, sender: RunSender
) -> None:
    token_ids = prompt(4, 3_000)
    expected = (await sender.ask("d", token_ids, cache_salt="apart")).token_ids
    streamed = await sender.run("d", token_ids, fetch_from=remote_prefill(sender))
    await sender.until_stored("p", 40)
    system.kill("p")
    terminal = await streamed.terminal()
    assert (terminal.finish_reason, streamed.token_ids) == ("length", expected)
    assert 0 < cached(terminal)[0] < 2_976
    assert len(streamed.terminals) == 1


async def test_a_remote_prefill_that_takes_much_longer_than_the_router_expects_is_given_up(
    system: System, sender: RunSender
) -> None:
    token_ids = prompt(5, 3_000)
    answer = await sender.ask("d", token_ids, fetch_from=remote_prefill(sender, leg_ms=100.0))
    assert answer.terminals[0].finish_reason == "length"
    assert 0 < cached(answer.terminals[0])[0] < 2_976
    await system.until_logged("p", "remote_prefill_ended")
    (ended,) = [line for line in system.log("p") if line["event"] == "remote_prefill_ended"]
    assert ended["outcome"] == "cancelled"


async def test_nothing_is_computed_elsewhere_for_a_request_that_must_not_be_cached(
    system: System, sender: RunSender
) -> None:
    answer = await sender.ask("d", prompt(6), fetch_from=remote_prefill(sender), cache_prompt=False)
    assert answer.terminals[0].finish_reason == "length"
    assert not sender.remote_prefills
