"""A fetch takes what is right, gives up in time, and never fails the request."""

import asyncio
import random

import pytest

from tests.worker.kv_exchange.stubs import ADAPTERS, SIZE, SOURCE, StubEngine, StubTransport, block, prefix, serving
from tokenbus.protocol.wire import block_hash, codec
from tokenbus.worker.contract import contract
from tokenbus.worker.kv_exchange import fetcher
from tokenbus.worker.kv_exchange.fetcher import Fetch, Fetcher
from tokenbus.worker.kv_exchange.transport import TransferError


async def real(number: int, num_bytes: int) -> bytes:
    return block(number)


async def never(number: int, num_bytes: int) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


async def fetch(transport: StubTransport, engine: StubEngine, num_blocks: int, first: int = 0) -> Fetch:
    return await Fetcher(transport).fetch(SOURCE, prefix(num_blocks), first, serving(engine))


async def test_blocks_come_in_order_and_only_those_that_are_missing() -> None:
    transport, engine = StubTransport(7, real), StubEngine()
    ended = await fetch(transport, engine, 10, first=3)
    assert (ended.outcome, ended.num_tokens) == ("complete", 7 * SIZE)
    assert sorted(engine.blocks) == list(range(3, 10))
    assert ended.num_bytes == 7 * len(block(0))
    assert transport.num_closed == 1
    (request,) = transport.requests
    assert (request.tenant, request.cache_salt, request.first, request.epoch) == ("acme", "salt", 3, "1-x")
    assert [(one.digest, one.scale) for one in request.adapters] == list(ADAPTERS)
    assert len(request.token_ids) == 4 * SIZE * 10


@pytest.mark.parametrize("promised", [1, 4, 2**31 - 1])
async def test_a_holder_that_promises_more_or_less_is_asked_for_no_more_than_the_prompt_has(promised: int) -> None:
    engine = StubEngine()
    await fetch(StubTransport(promised, real), engine, 5)
    assert sorted(engine.blocks) == list(range(min(promised, 5)))


async def test_a_holder_with_nothing_is_no_error() -> None:
    assert (await fetch(StubTransport(0, real), StubEngine(), 5)).outcome == "nothing"


async def test_nobody_is_asked_for_blocks_that_are_there() -> None:
    transport, engine = StubTransport(5, real), StubEngine()
    engine.prefill_tokens_per_s = 1000.0
    assert (await fetch(transport, engine, 5, first=5)).outcome == "nothing"
    assert not transport.requests


@pytest.mark.parametrize("at", [0, 1, 6])
async def test_what_came_before_a_failure_is_kept(at: int) -> None:
    async def evicted(number: int, num_bytes: int) -> bytes:
        if number >= at:
            raise TransferError("evicted", "gone")
        return block(number)

    engine = StubEngine()
    ended = await fetch(StubTransport(9, evicted), engine, 9)
    assert ended.outcome == ("partial" if at else "evicted")
    assert sorted(engine.blocks) == list(range(at))


async def test_a_holder_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "STALL_S", 0.02)
    transport, engine = StubTransport(9, never), StubEngine()
    assert (await fetch(transport, engine, 9)).outcome == "timeout"
    assert (engine.blocks, transport.num_closed) == ({}, 1)


async def test_a_fetch_takes_at_most_half_the_time_of_computing() -> None:
    engine = StubEngine()
    engine.prefill_tokens_per_s = 9 * SIZE / 0.1
    ended = await fetch(StubTransport(9, never), engine, 9)
    assert ended.outcome == "timeout"
    assert 0.05 <= ended.seconds < fetcher.STALL_S


async def test_a_bug_in_a_transport_is_no_error_of_the_request() -> None:
    async def broken(number: int, num_bytes: int) -> bytes:
        raise KeyError(number)

    assert (await fetch(StubTransport(9, broken), StubEngine(), 9)).outcome == "failed"


async def test_a_fetch_that_is_cancelled_ends_its_lease_and_its_reads() -> None:
    transport, engine = StubTransport(9, never), StubEngine()
    fetches = Fetcher(transport)
    task = asyncio.create_task(fetches.fetch(SOURCE, prefix(9), 0, serving(engine)))
    while not transport.requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (transport.num_closed, fetches.num_running, len(asyncio.all_tasks())) == (1, 0, 1)


async def test_a_fetch_that_is_cancelled_as_its_time_is_over_ends_its_lease() -> None:
    transport = StubTransport(9, never)
    task = asyncio.create_task(fetch(transport, StubEngine(), 9))
    while not transport.requests:
        await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert transport.num_closed == 1


async def test_of_ten_thousand_hostile_answers_none_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "STALL_S", 60.0)  # however busy the machine is
    monkeypatch.setattr(fetcher, "MAX_FETCH_S", 60.0)
    rng = random.Random(3)
    for _ in range(10_000):
        bad_at = rng.randrange(4)

        async def hostile(number: int, num_bytes: int, bad_at: int = bad_at) -> bytes:
            content = block(number)
            if number != bad_at:
                return content
            match rng.randrange(5):
                case 0:
                    return content[: rng.randrange(len(content))]
                case 1:
                    return content + rng.randbytes(8)
                case 2:
                    return block(number + rng.choice((-1, 1, 1 << 20)) if number else 1)
                case 3:
                    return rng.randbytes(len(content))
                case _:
                    raise TransferError(rng.choice(("corrupt", "lost")), "bad")

        engine = StubEngine()  # fails for a block that is wrong
        ended = await fetch(StubTransport(4, hostile), engine, 4)
        assert sorted(engine.blocks) == list(range(bad_at))
        assert ended.num_tokens == bad_at * SIZE


def prompt(num_tokens: int) -> contract.CachedPrefix:
    return codec.replace(prefix(0), token_ids=block_hash.pack_token_ids(range(num_tokens)))


@pytest.mark.parametrize(("num_tokens", "wanted"), [(1, 0), (15, 0), (16, 1), (17, 1), (47, 2), (48, 3)])
def test_all_whole_blocks_of_a_prompt_are_fetched(num_tokens: int, wanted: int) -> None:
    fetching = fetcher._Fetching(prompt(num_tokens), 0, serving(StubEngine()))
    assert fetching.num_wanted == wanted
    assert fetching.prefix.token_ids == prompt(SIZE * wanted).token_ids


@pytest.mark.parametrize(
    ("num_tokens", "first", "asked"),
    [
        (32, 0, [*range(32)]),
        (33, 0, [*range(32)]),  # the 33rd is computed in any case
        (34, 0, [*range(34), *[33] * 14]),
        (47, 1, [*range(47), 46]),
        (48, 1, [*range(48)]),
        (47, 2, []),  # the whole blocks have come meanwhile, and the rest is not worth a remote prefill
        (4_090, 0, [*range(4_080)]),  # filled up, there would be no room for the token that ends a remote prefill
    ],
)
async def test_a_remote_prefill_computes_all_tokens_but_the_last_in_blocks_that_are_filled_up(
    num_tokens: int, first: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "STALL_S", 0.01)
    transport = StubTransport(999, never)
    source = codec.replace(SOURCE, leg_ms=1.0)
    await Fetcher(transport).fetch(source, prompt(num_tokens), first, serving(StubEngine()))
    assert [block_hash.unpack_token_ids(one.token_ids).tolist() for one in transport.requests] == [asked] * bool(asked)


async def test_a_remote_prefill_is_asked_for_by_its_request_and_waits_longer_than_a_fetch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetcher, "STALL_S", 0.02)
    transport, engine = StubTransport(9, never), StubEngine()
    engine.prefill_tokens_per_s = 1e9  # a fetch would have no time at all
    source = codec.replace(SOURCE, leg_ms=50.0)
    ended = await Fetcher(transport).fetch(source, prefix(9), 0, serving(engine), "acme:r-1", -3)
    assert ended.outcome == "timeout"
    assert fetcher.REMOTE_PREFILL_PATIENCE * 0.05 + 0.02 <= ended.seconds < 1.0
    (request,) = transport.requests
    assert (request.computed_for, request.priority) == ("acme:r-1", -3)


async def test_who_only_fetches_asks_for_nothing_to_be_computed() -> None:
    transport = StubTransport(9, real)
    await Fetcher(transport).fetch(SOURCE, prefix(9), 0, serving(StubEngine()), "acme:r-1", -3)
    assert (transport.requests[0].computed_for, transport.requests[0].priority) == ("", 0)


async def test_fetches_that_are_let_in_at_once_are_no_more_than_others() -> None:
    transport = StubTransport(9, never)
    fetches = Fetcher(transport)
    tasks = [asyncio.create_task(fetches.fetch(SOURCE, prefix(9), 0, serving(StubEngine()))) for _ in range(5)]
    done, running = await asyncio.wait(tasks, timeout=0.05)
    assert sorted(one.result().outcome for one in done) == ["busy"] * (5 - fetcher.MAX_FETCHES)
    assert len(transport.requests) == fetcher.MAX_FETCHES
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_remote_prefills_and_fetches_are_bounded_apart() -> None:
    fetches, remote_prefill = Fetcher(StubTransport(9, never)), codec.replace(SOURCE, leg_ms=1e6)
    for source, most in ((remote_prefill, fetcher.MAX_REMOTE_PREFILLS), (SOURCE, fetcher.MAX_FETCHES)):
        tasks = []
        for _ in range(most):
            assert fetches.has_room(source)
            task = fetches.fetch(source, prefix(9), 0, serving(StubEngine()))
            tasks.append(asyncio.create_task(task))
            await asyncio.sleep(0)
        assert not fetches.has_room(source)
        for running in tasks:
            running.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (fetches.num_running, fetches.num_remote_prefills) == (0, 0)
