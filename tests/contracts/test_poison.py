"""A request for which the model computes no numbers ends alone, in every engine, layout and kind of cache: whoever runs
beside it or comes later gets the answer that it gets alone."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio

from tests.contracts.driving import prompt, request, run, settled, start
from tests.support import poisoned_model
from tests.support.engines import ONNX, Recorder, demo_engine, exact_demo, gqa_demo
from tests.support.poisoned_model import POISON
from tokenbus.protocol.wire import errors, messages
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings

LATER = 40
TOKENS = 40


def model(kind: str, **changes: object) -> Callable[[], EngineSettings]:
    return lambda: msgspec.structs.replace(poisoned_model.gguf_model(kind), **changes)


def demo(**changes: object) -> Callable[[], EngineSettings]:
    return lambda: msgspec.structs.replace(exact_demo(), **changes)


F16 = {"cache_type_k": "f16", "cache_type_v": "f16"}
FLASH_Q8 = {"flash_attention": "on", "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
BY_TOKEN: dict[str, Callable[[], EngineSettings]] = {
    "unified": model("llama"),
    "unified-f16": model("llama", **F16),
    "unified-flash": model("llama", flash_attention="on"),
    "unified-q8_0": model("llama", **FLASH_Q8),
    "unified-q4_0": model("llama", **FLASH_Q8 | {"cache_type_k": "q4_0", "cache_type_v": "q4_0"}),
    "hybrid": model("hybrid"),
    "recurrent": model("recurrent"),
    "window": model("window"),
    "window-flash": model("window", flash_attention="on"),
    "sim": lambda: EngineSettings(model="dynamo", engine="sim", sim_speedup=50.0, sim_faults=f"poison@{POISON}"),
}
BY_ADAPTER: dict[str, Callable[[], EngineSettings]] = {
    "unified": demo(),
    "onnx-plain": lambda: ONNX,
    "onnx-gqa": lambda: msgspec.structs.replace(ONNX, model=str(gqa_demo())),
}


INEXACT = ("f16", "flash", "q8_0", "q4_0")
"""Numbers of 16 bits are rounded differently in other company, so that a token may be another one."""


class Poisonous(NamedTuple):
    """An engine, and what makes a request poisonous for it."""

    engine: contract.Engine
    config: contract.EngineConfig
    token_ids: list[int] = []
    adapters: tuple[Adapter, ...] = ()
    is_exact: bool = True

    def request(self, token_ids: list[int], **sampling: object) -> engine_request.EngineRequest:
        asked = request([*token_ids, *self.token_ids], **sampling)  # type: ignore[arg-type]
        return msgspec.structs.replace(asked, adapters=self.adapters)


EVERY = [f"token-{name}" for name in BY_TOKEN] + [f"adapter-{name}" for name in BY_ADAPTER]
LONG = ("adapter-onnx-plain", "token-unified-f16", "token-unified-flash", "token-unified-q4_0", "token-window-flash")
"""Of these caches, `make test` tries q8_0, which has flash attention, and a window; of ONNX graphs, that with GQA."""


@pytest_asyncio.fixture(params=[pytest.param(one, marks=pytest.mark.long if one in LONG else ()) for one in EVERY])
async def poisonous(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Poisonous]:
    kind, _, name = request.param.partition("-")
    engine = demo_engine((BY_TOKEN if kind == "token" else BY_ADAPTER)[name]())
    config = await engine.start("kit")
    if kind == "token":
        yield Poisonous(engine, config, token_ids=[POISON], is_exact=not name.endswith(INEXACT))
    else:
        digest = await engine.load_adapter(str(poisoned_model.write_overflowing(tmp_path / "overflow.gguf", 1e20)))
        yield Poisonous(engine, config, adapters=(Adapter(digest, 1.0),))
    await engine.cleanup()


def assert_poisoned(recorder: Recorder) -> None:
    (terminal,) = recorder.terminals
    assert terminal.finish_reason is messages.FinishReason.ERROR
    assert terminal.error is not None
    assert terminal.error.code is errors.Code.INTERNAL


def texts(config: contract.EngineConfig) -> list[list[int]]:
    """Prompts of which some share more than a block, and none has the poisonous token."""
    shared = prompt(config, 7, 40)
    return [[token % 256 + 1 for token in [*shared[: 40 * (n % 2)], *prompt(config, n, 5 + n)]] for n in range(6)]


def innocent(token_ids: list[int], **sampling: object) -> engine_request.EngineRequest:
    """A request whose answer does not have the poisonous token either."""
    return request(token_ids, logit_bias=((POISON, -1e9),), **sampling)  # type: ignore[arg-type]


def assert_same(found: list[int], expected: list[int], *, is_exact: bool) -> None:
    assert len(found) == len(expected)
    assert found == expected or not is_exact


async def test_all_others_get_the_answers_that_they_get_alone(poisonous: Poisonous) -> None:
    engine, asked = poisonous.engine, texts(poisonous.config)
    async with asyncio.timeout(100):
        alone = [(await run(engine, innocent(one, max_tokens=TOKENS))).token_ids for one in asked]
        assert [len(tokens) for tokens in alone] == [TOKENS] * len(asked)
        running = [start(engine, innocent(one, max_tokens=TOKENS)) for one in asked]
        await running[0].until(lambda seen: len(seen.token_ids) >= 2)
        prompts = [one[:8] * times for one, times in zip(asked, (1, 2, 9), strict=False)]
        culprits = [start(engine, poisonous.request(one)) for one in prompts]
        for recorder, expected in zip(running, alone, strict=True):
            await recorder.terminal()
            assert_same(recorder.token_ids, expected, is_exact=poisonous.is_exact)
        for culprit in culprits:
            await culprit.terminal()
            assert_poisoned(culprit)
        for number in range(LATER):
            later = await run(engine, innocent(asked[number % len(asked)], max_tokens=10))
            assert_same(later.token_ids, alone[number % len(asked)][:10], is_exact=poisonous.is_exact)
        await settled(engine)


async def test_nothing_of_a_poisonous_request_is_cached_and_all_that_was_cached_stays(poisonous: Poisonous) -> None:
    engine, config = poisonous.engine, poisonous.config
    stored: list[int] = []
    engine.on_kv_events = lambda removed, new: stored.extend(name for _, name in new)
    asked = [token % 256 + 1 for token in prompt(config, 3, 60)]
    before = await run(engine, request(asked, max_tokens=8))
    await settled(engine)
    stored.clear()
    assert_poisoned(await run(engine, poisonous.request(prompt(config, 5, 2) + poisonous.token_ids + [9] * 70)))
    await settled(engine)
    assert not stored
    again = await run(engine, request(asked, max_tokens=8))
    assert again.token_ids == before.token_ids
    first = next(one.first_token for one in again.outputs if one.first_token is not None)
    assert (first.cached_tokens > 0) == config.prefix_cache


def without_numbers(block: bytes, config: contract.EngineConfig) -> bytes:
    """Returns a block with the form that it had, all of whose keys and values are none."""
    assert config.kv_format is not None
    poisoned = bytearray(b"\xff" * len(block))
    for offset, same in (
        *config.kv_format.fixed,
        *((place, block[place : place + 4]) for places in config.kv_format.positions for place in places),
        *((place, block[place : place + 4]) for place in config.kv_format.token_ids),
    ):
        poisoned[offset : offset + len(same)] = same
    return bytes(poisoned)


async def test_a_prompt_whose_fetched_blocks_have_no_numbers_is_computed_and_harms_nobody(poisonous: Poisonous) -> None:
    engine, config = poisonous.engine, poisonous.config
    if config.kv_format is None or config.engine == "sim":
        pytest.skip("it exchanges no blocks, or they hold nothing")
    asked = [token % 256 + 1 for token in prompt(config, 3, 60)]
    other = [token % 256 + 1 for token in prompt(config, 4, 30)]
    before = [(await run(engine, innocent(one, max_tokens=TOKENS))).token_ids for one in (asked, other)]
    prefix = contract.CachedPrefix("", "", (), array("I", asked).tobytes())
    _, blocks = await engine.export_blocks(prefix, 0, 9)
    assert len(blocks) == len(asked) // config.kv_block_size
    engine.clear_cache()
    running = start(engine, innocent(other, max_tokens=TOKENS))
    engine.put_blocks(prefix, 0, [without_numbers(block, config) for block in blocks])
    again = await run(engine, innocent(asked, max_tokens=TOKENS))
    await running.terminal()
    for found, expected in zip((again, running), before, strict=True):
        assert_same(found.token_ids, expected, is_exact=poisonous.is_exact)
    await settled(engine)
