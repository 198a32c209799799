"""Drives an engine through its contract: requests, streams, and what they leave behind."""

import asyncio
import itertools
from collections.abc import AsyncIterator

from tests.support.engines import Recorder
from tokenbus.worker.contract import contract, engine_output, engine_request
from tokenbus.worker.contract.contract import StreamValidator

SETTLE_S = 10.0

_keys = itertools.count()


def new_key() -> str:
    return f"default:kit-{next(_keys)}"


def request(
    token_ids: list[int],
    *,
    stop: tuple[str, ...] = (),
    tenant: str = "",
    salt: str = "",
    cache: bool = True,
    **sampling: object,
) -> engine_request.EngineRequest:
    fields: dict[str, object] = {"max_tokens": 24, "ignore_eos": True} | sampling
    return engine_request.EngineRequest(
        key=new_key(),
        token_ids=token_ids,
        sampling=engine_request.Sampling(**fields),  # type: ignore[arg-type]
        stop=stop,
        tenant=tenant,
        cache_salt=salt,
        cache_prompt=cache,
    )


def start(engine: contract.Engine, asked: engine_request.EngineRequest) -> Recorder:
    recorder = Recorder()
    engine.generate(asked, StreamValidator(asked, recorder))
    return recorder


async def run(engine: contract.Engine, asked: engine_request.EngineRequest) -> Recorder:
    recorder = start(engine, asked)
    await recorder.terminal()
    return recorder


async def stream(engine: contract.Engine, asked: engine_request.EngineRequest) -> AsyncIterator[engine_output.Output]:
    """The outputs one by one; leaving early aborts."""
    queue: asyncio.Queue[engine_output.Output] = asyncio.Queue()
    engine.generate(asked, queue.put_nowait)
    try:
        while True:
            output = await queue.get()
            yield output
            if output.finish_reason is not None:
                return
    finally:
        engine.abort(asked.key)


def prompt(config: contract.EngineConfig, number: int = 0, length: int = 6) -> list[int]:
    """Different prompts of ordinary tokens."""
    return [7 + (31 * number + 13 * place + place * place) % (config.vocab_size - 8) for place in range(length)]


async def settled(engine: contract.Engine) -> None:
    """Everything is given back."""
    async with asyncio.timeout(SETTLE_S):
        await engine.drain()
    load = engine.load()
    assert (load.running, load.waiting, load.used_blocks, load.queued_prefill_tokens) == (0, 0, 0, 0), load
