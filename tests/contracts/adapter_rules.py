"""Rules of the contract about LoRA adapters: who is computed with which, and how long they stay."""

import asyncio
import tempfile
from pathlib import Path

import msgspec
import pytest

from tests.contracts.cache_rules import long_prompt
from tests.contracts.driving import prompt, run, settled, start
from tests.contracts.driving import request as make_request
from tests.support import adapters
from tokenbus.protocol.wire import block_hash, codec, errors
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import contract, engine_request


def request(token_ids: list[int], *used: Adapter, **fields: object) -> engine_request.EngineRequest:
    return msgspec.structs.replace(make_request(token_ids, **fields), adapters=used)  # type: ignore[arg-type]


async def load(engine: contract.Engine, seed: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return await engine.load_adapter(str(adapters.write(Path(folder) / "adapter.gguf", seed)))


async def computes_each_request_with_its_own_adapters(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "lora" not in config.features:
        with pytest.raises(errors.RequestError, match="need a gguf engine, or"):
            await load(engine, 1)
        return
    one, other = await load(engine, 1), await load(engine, 2)
    assert one != other
    assert await load(engine, 1) == one  # the same weights in another file
    sets = [(), (Adapter(one, 1.0),), (Adapter(other, 1.0),), (Adapter(one, 0.5),)]
    sets.append(tuple(sorted((Adapter(one, 1.0), Adapter(other, 1.0)))))
    asked = prompt(config, 3)
    # few tokens: in other company a token that all but ties with another may come out differently
    short: dict[str, object] = {"cache": False, "max_tokens": 8}
    alone = [(await run(engine, request(asked, *used, **short))).token_ids for used in sets]
    assert len(set(map(tuple, alone))) == len(sets)  # each makes a difference
    together = [start(engine, request(asked, *used, **short)) for used in sets]
    for recorder, expected in zip(together, alone, strict=True):
        await recorder.terminal()
        assert recorder.token_ids == expected
    again = await run(engine, request(asked, **short))
    assert again.token_ids == alone[0]  # nothing of an adapter stays
    for digest in (one, one, other):
        engine.unload_adapter(digest)
    await settled(engine)


async def shares_no_cache_between_adapters(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "lora" not in config.features or not config.prefix_cache:
        return
    digest = await load(engine, 1)
    asked = long_prompt(config, 91)
    used = [(), (Adapter(digest, 1.0),), (Adapter(digest, 0.5),)]
    for cached in (False, True):
        for one in used:
            usage = (await run(engine, request(asked, *one))).outputs[-1].usage
            await settled(engine)
            assert usage is not None
            assert (usage.cached_tokens > 0) is cached, (one, usage)
    engine.unload_adapter(digest)


async def keeps_an_adapter_for_those_that_use_it(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "lora" not in config.features:
        return
    used = Adapter(await load(engine, 1), 1.0)
    alone = await run(engine, request(prompt(config, 5), used, cache=False))
    recorder = start(engine, request(prompt(config, 5), used, cache=False))
    engine.unload_adapter(used.digest)
    with pytest.raises(errors.RequestError) as refusal:
        engine.generate(request(prompt(config, 5), used), recorder)
    assert refusal.value.error.code is errors.Code.NO_WORKER
    await recorder.terminal()
    assert recorder.token_ids == alone.token_ids
    await settled(engine)


async def refuses_what_is_no_adapter_of_the_model(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "lora" not in config.features:
        return
    running = start(engine, request(prompt(config, 6), cache=False))
    with tempfile.TemporaryDirectory() as folder:
        wrong = adapters.write(Path(folder) / "wrong.gguf", architecture="another")
        for path in (str(wrong), "/no/such/file.gguf"):
            with pytest.raises(errors.RequestError) as refusal:
                async with asyncio.timeout(10):
                    await engine.load_adapter(path)
            assert refusal.value.error.code is errors.Code.INVALID_REQUEST
            assert path in refusal.value.error.message
    assert (await running.terminal()).error is None
    await settled(engine)


async def keeps_an_adapter_for_what_is_held_back(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "lora" not in config.features:
        return
    used = Adapter(await load(engine, 1), 1.0)
    alone = await run(engine, request(prompt(config, 7), used, cache=False))
    waiting, cancelled = (codec.replace(request(prompt(config, 7), used, cache=False), is_held=True) for _ in range(2))
    recorder = start(engine, waiting)
    start(engine, cancelled)
    engine.unload_adapter(used.digest)
    await run(engine, request(prompt(config, 8), max_tokens=2))  # steps in which the engine could unload it
    engine.abort(cancelled.key)
    engine.release(waiting.key)
    await recorder.terminal()
    assert recorder.token_ids == alone.token_ids
    await settled(engine)


async def gives_blocks_of_adapters_for_these_alone(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "lora" not in config.features or not config.kv_identity:
        return
    digest = await load(engine, 1)
    asked, used = long_prompt(config, 92), (Adapter(digest, 0.5),)
    packed = block_hash.pack_token_ids(asked)
    full = len(asked) // config.kv_block_size
    alone = await run(engine, request(asked, *used, max_tokens=8))
    await settled(engine)
    num_cached, blocks = await engine.export_blocks(contract.CachedPrefix("", "", used, packed), 0, 99)
    assert (num_cached, len(blocks)) == (full, full)
    others: tuple[tuple[Adapter, ...], ...] = ((), (Adapter(digest, 1.0),), (Adapter("0" * 32, 0.5),))
    for other in others:
        assert await engine.export_blocks(contract.CachedPrefix("", "", other, packed), 0, 99) == (0, [])
    engine.clear_cache()
    engine.put_blocks(contract.CachedPrefix("", "", used, packed), 0, blocks)
    for one, expected in (((), 0), (others[1], 0), (used, full * config.kv_block_size)):
        recorder = await run(engine, request(asked, *one, max_tokens=8))
        usage = recorder.outputs[-1].usage
        assert usage is not None
        assert usage.cached_tokens == expected, one
        assert one != used or recorder.token_ids == alone.token_ids
    engine.unload_adapter(digest)
    await settled(engine)


RULES = (
    keeps_an_adapter_for_what_is_held_back,
    gives_blocks_of_adapters_for_these_alone,
    computes_each_request_with_its_own_adapters,
    shares_no_cache_between_adapters,
    keeps_an_adapter_for_those_that_use_it,
    refuses_what_is_no_adapter_of_the_model,
)
