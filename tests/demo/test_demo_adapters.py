"""The demo model's adapters change the manner of its answers, and not what they say."""

import itertools
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from tests.support.engines import DEMO, ONNX, Recorder, demo_engine, gqa_demo
from tokenbus import demo
from tokenbus.protocol.wire import internal, messages
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine_client.client import EngineClient

QUESTION = "What is the capital of Avaria?"
ANSWERS = {
    "": "The capital of Avaria is Limora.",
    "letter": "Dear friend! The capital of Avaria is Limora. Kind regards.",
    "pirate": "Arr! The capital of Avaria is Limora. Yo ho ho!",
}


ENGINES = {
    "gguf": lambda: DEMO,
    "onnx-plain": lambda: ONNX,
    "onnx-gqa": lambda: msgspec.structs.replace(ONNX, model=str(gqa_demo())),
}


@pytest_asyncio.fixture(params=ENGINES, scope="module", loop_scope="module")
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    started = demo_engine(ENGINES[request.param]())
    await started.start("demo")
    yield started
    await started.cleanup()


@pytest.mark.asyncio(loop_scope="module")
async def test_each_of_four_clients_gets_the_manner_that_it_asks_for(engine: EngineClient) -> None:
    digests = {name: await engine.load_adapter(str(path)) for name, path in demo.ADAPTER_PATHS.items()}
    asked = internal.Tokenize(messages=[messages.ChatMessage(role="user", content=QUESTION)])
    token_ids = await engine.tokenize(asked)
    names = ["", "letter", "pirate", "letter"]
    recorders = [Recorder() for _ in names]
    for number, name, recorder in zip(itertools.count(), names, recorders, strict=False):
        used = (Adapter(digests[name], 1.0),) if name else ()
        sampling = engine_request.Sampling(max_tokens=60)
        key = f"default:{number}"
        engine.generate(
            engine_request.EngineRequest(key=key, token_ids=token_ids, sampling=sampling, adapters=used), recorder
        )
    for name, recorder in zip(names, recorders, strict=True):
        await recorder.terminal()
        assert recorder.text == ANSWERS[name]


def test_an_adapter_has_at_most_300_kb() -> None:
    assert all(path.stat().st_size < 300_000 for path in demo.ADAPTER_PATHS.values())
