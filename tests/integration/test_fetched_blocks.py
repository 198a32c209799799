"""A worker fetches the blocks of a prompt from another one, and computes them where it can't."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support import adapters
from tests.support.run_sender import RunSender
from tests.support.system import System
from tokenbus.protocol.wire import messages
from tokenbus.protocol.wire.block_hash import Adapter

SIZE = 16
FLAGS = ("--context-length", "2048", "--kv-tokens", "8192")


def prompt(number: int, length: int = 2_000) -> list[int]:
    return [7 + (31 * number + 13 * place + place * place) % 400 for place in range(length)]


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    for name in ("a", "b"):
        system.worker(name, *FLAGS)
    yield system
    await system.stop()


@pytest.fixture
async def sender(system: System) -> RunSender:
    sender = RunSender((await system.connect()).nats)
    await sender.open("a", "b")
    return sender


def usage(chunk: messages.Chunk) -> messages.Usage:
    assert isinstance(chunk.usage, messages.Usage)
    return chunk.usage


def fetched_tokens(chunk: messages.Chunk) -> object:
    assert isinstance(chunk.timings, messages.Timings)
    return chunk.timings.fetched_tokens


async def test_a_prompt_that_another_worker_has_computed_is_fetched(sender: RunSender) -> None:
    token_ids = prompt(1)
    first = await sender.ask("a", token_ids)
    second = await sender.ask("b", token_ids, fetch_from=sender.source("a"))
    whole = len(token_ids)
    assert whole % SIZE == 0
    # the last token is computed in any case
    assert usage(second.terminals[0]).cached_tokens == fetched_tokens(second.terminals[0]) == whole - 1
    assert second.token_ids == first.token_ids
    told = await sender.until_fetched(1)
    assert (told.worker_id, told.fetched_tokens) == ("a", whole)
    card = sender.cards["a"]
    assert told.fetched_bytes == pytest.approx(whole * card.kv_token_bytes, rel=0.01)
    # the blocks are b's own from now on
    third = await sender.ask("b", [*token_ids, 9])
    assert usage(third.terminals[0]).cached_tokens >= whole


async def test_only_blocks_that_are_missing_are_fetched(sender: RunSender) -> None:
    token_ids = prompt(2)
    await sender.ask("a", token_ids)
    # b computes so little that it does not know how fast it is, and a fetch may take long
    for length, expected in ((1_009, 1_008), (2_000, 1_999 - 1_008)):
        answer = await sender.ask("b", token_ids[:length], fetch_from=sender.source("a"))
        assert usage(answer.terminals[0]).cached_tokens == length - 1
        assert fetched_tokens(answer.terminals[0]) == expected


async def test_nothing_is_fetched_of_another_tenant_or_salt_or_without_a_cache(sender: RunSender) -> None:
    token_ids = prompt(3)
    await sender.ask("a", token_ids, cache_salt="mine")
    for options in ({"tenant": "acme", "cache_salt": "mine"}, {"cache_salt": "other"}, {}):
        answer = await sender.ask("b", token_ids, fetch_from=sender.source("a"), **options)
        assert (usage(answer.terminals[0]).cached_tokens, fetched_tokens(answer.terminals[0])) == (0, 0)
    answer = await sender.ask("b", token_ids, fetch_from=sender.source("a"), cache_salt="mine", cache_prompt=False)
    assert usage(answer.terminals[0]).cached_tokens == 0
    assert [one.fetched_tokens for one in sender.fetches] == [0, 0, 0]


async def test_blocks_of_adapters_are_fetched_for_these_alone(system: System, tmp_path: Path) -> None:
    path = adapters.write(tmp_path / "style.gguf")
    for name in ("c", "d"):
        system.worker(name, *FLAGS, "--lora", f"style={path}")
    sender = RunSender((await system.connect()).nats)
    await sender.open("a", "c", "d")
    (digest,) = [one.digest for one in sender.cards["d"].adapters]
    lora = [messages.Lora(name="style", scale=0.5)]
    used = {"adapters": (Adapter(digest, 0.5),), "lora": lora}
    token_ids = prompt(9)
    await sender.ask("d", token_ids)  # blocks of the model alone are no beginning of those with an adapter
    first = await sender.ask("c", token_ids, **used)
    louder = {"adapters": (Adapter(digest, 1.0),), "lora": [messages.Lora(name="style")]}
    for worker_id, options in (("d", louder), ("d", used | {"cache_salt": "other"}), ("a", {})):
        answer = await sender.ask(worker_id, token_ids, fetch_from=sender.source("c"), **options)
        assert (usage(answer.terminals[0]).cached_tokens, fetched_tokens(answer.terminals[0])) == (0, 0)
    second = await sender.ask("d", token_ids, fetch_from=sender.source("c"), **used)
    assert usage(second.terminals[0]).cached_tokens == fetched_tokens(second.terminals[0]) == len(token_ids) - 1
    assert second.token_ids == first.token_ids


async def test_a_source_that_is_not_there_costs_nothing_but_computing(sender: RunSender) -> None:
    token_ids = prompt(4, 300)
    await sender.ask("a", token_ids)
    for source in (sender.source("nobody", "1-x"), sender.source("a", "1-x"), sender.source("b")):
        answer = await sender.ask("b", token_ids, fetch_from=source, cache_salt=source.worker_id + source.epoch)
        assert answer.terminals[0].finish_reason == "length"
        assert usage(answer.terminals[0]).cached_tokens == 0


async def test_a_holder_that_stands_still_or_dies_in_the_middle_costs_no_more_than_computing(
    system: System, sender: RunSender
) -> None:
    token_ids = prompt(5)
    expected = (await sender.ask("a", token_ids)).token_ids
    engine = system.engine_pid("a")
    os.kill(engine, signal.SIGSTOP)  # the frontend answers, and its engine gives nothing
    streamed = await sender.run("b", token_ids, fetch_from=sender.source("a"))
    await asyncio.sleep(0.2)
    system.kill("a")
    terminal = await streamed.terminal()
    assert terminal.finish_reason == "length"
    assert streamed.token_ids == expected
    assert len(streamed.terminals) == 1


async def test_a_stream_that_is_cancelled_while_its_blocks_come_has_one_terminal(
    system: System, sender: RunSender
) -> None:
    token_ids = prompt(6)
    await sender.ask("a", token_ids)
    engine = system.engine_pid("a")
    os.kill(engine, signal.SIGSTOP)
    streamed = await sender.run("b", token_ids, fetch_from=sender.source("a"))
    await sender.cancel("b", "r-1")
    assert (await streamed.terminal()).finish_reason == "cancelled"
    os.kill(engine, signal.SIGCONT)
    after = await sender.ask("b", prompt(7, 100))
    assert after.terminals[0].finish_reason == "length"
    assert len(streamed.terminals) == 1


async def test_an_engine_that_dies_while_blocks_come_is_replaced_by_one_that_computes(
    system: System, sender: RunSender
) -> None:
    token_ids = prompt(8, 600)
    expected = (await sender.ask("a", token_ids)).token_ids
    os.kill(system.engine_pid("a"), signal.SIGSTOP)
    streamed = await sender.run("b", token_ids, fetch_from=sender.source("a"))
    os.kill(system.engine_pid("b"), signal.SIGKILL)
    assert (await streamed.terminal()).finish_reason == "length"
    assert streamed.token_ids == expected
