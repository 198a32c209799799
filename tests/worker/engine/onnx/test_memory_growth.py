"""An engine process takes no more memory than it planned, while a session grows and while streams share its prefix."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.engines import Recorder, demo_engine
from tests.support.models import random_onnx
from tests.support.models.shape import Shape
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine_client.client import EngineClient
from tools.demo_model.onnx_graph import Flavour

CONTEXT = 2_048
SHAPE = Shape(layers=2, width=512, feed_forward=512, heads=8, kv_heads=8, vocab=512, context=CONTEXT)
TOKEN_BYTES = 2 * 2 * 512 * 4
STREAMS = 4


def request(key: str, token_ids: list[int], max_tokens: int) -> engine_request.EngineRequest:
    sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
    return engine_request.EngineRequest(key=key, token_ids=token_ids, sampling=sampling)


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


async def answers(engine: EngineClient, requests: list[engine_request.EngineRequest]) -> None:
    recorders = [Recorder() for _ in requests]
    for one, recorder in zip(requests, recorders, strict=True):
        engine.generate(one, recorder)
    for recorder in recorders:
        await recorder.until(lambda one: bool(one.terminals))
        assert recorder.terminals[0].finish_reason == "length"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("flavour", ["plain", pytest.param("gqa", marks=pytest.mark.long)])
async def test_a_growing_session_and_streams_that_share_it_stay_within_the_plan(
    tmp_path: Path, flavour: Flavour
) -> None:
    random_onnx.write(tmp_path / "model", SHAPE, flavour)
    engine = demo_engine(EngineSettings(model=str(tmp_path / "model"), threads=1, host_cache_mib=0))
    config = await engine.start("growing")
    plan = config.memory
    assert plan is not None
    copies = 1 if flavour == "gqa" else 2
    assert plan.kv_bytes >= (4 + 1) * CONTEXT * TOKEN_BYTES * copies
    loaded, highest = anonymous_bytes(config.pid), 0
    text = [(7 * place) % 500 for place in range(CONTEXT - 256)]

    async def watch() -> None:
        nonlocal highest
        while True:
            highest = max(highest, anonymous_bytes(config.pid))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    for turn in range(1, 4):  # each prompt begins with the one before
        await answers(engine, [request(f"turn {turn}", text[: turn * CONTEXT // 4], 8)])
    session = highest - loaded
    await answers(engine, [request(f"stream {one}", [*text, one], 24 + one) for one in range(STREAMS)])
    watching.cancel()
    await engine.cleanup()
    assert session > CONTEXT // 2 * TOKEN_BYTES
    assert highest - loaded > 2 * CONTEXT * TOKEN_BYTES, "the streams have copies of the prefix"
    assert highest <= 1.05 * (plan.planned_bytes), (highest, plan)
    assert highest - loaded <= 1.05 * (plan.kv_bytes + plan.compute_bytes)
