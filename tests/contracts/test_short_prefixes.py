"""Every engine caches a prefix from a least length on, and nothing that is shorter."""

from collections.abc import Callable

import msgspec
import pytest

from tests.contracts.driving import prompt, request, run, settled
from tests.support.engines import DEMO, ONNX, demo_engine, stateful
from tokenbus.worker.contract.engine_settings import EngineSettings, SchedulerSettings

KINDS: dict[str, Callable[[], EngineSettings]] = {
    "gguf": lambda: DEMO,
    "onnx": lambda: ONNX,
    "hybrid": lambda: stateful("hybrid"),
}
LEAST = 60


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prefix_is_found_again_if_it_had_the_least_length(kind: str) -> None:
    engine = demo_engine(msgspec.structs.replace(KINDS[kind](), scheduler=SchedulerSettings(min_prefix_tokens=LEAST)))
    config = await engine.start("kit")
    stored: list[int] = []
    engine.on_kv_events = lambda removed, new: stored.extend(name for _, name in new)
    short, long = prompt(config, 1, LEAST - 9), prompt(config, 2, LEAST + 30)
    for token_ids, is_cached in ((short, False), (long, True)):
        before = await run(engine, request(token_ids, max_tokens=8))
        await settled(engine)
        assert bool(stored) == is_cached
        again = await run(engine, request([*token_ids, 5], max_tokens=8))
        first = next(one.first_token for one in again.outputs if one.first_token is not None)
        assert (first.cached_tokens > 0) == is_cached
        assert len(before.token_ids) == len(again.token_ids) == 8
    await engine.cleanup()
