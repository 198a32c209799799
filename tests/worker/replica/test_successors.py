"""An engine that replaces another has its sizes, whatever was asked for and whatever the model is like."""

import contextlib
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines import DEMO, ONNX, gguf_runner, gqa_demo, stateful
from tokenbus.worker.contract.contract import EngineConfig
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.onnx import runner as onnx_runner
from tokenbus.worker.engine.sim.runner import SimRunner
from tokenbus.worker.replica.replica import cautious_settings, successor_settings


def load_onnx(asked: EngineSettings) -> Runner:
    return onnx_runner.load(asked, lambda share: None, LoadedModels())


LOADS: dict[str, tuple[Callable[[EngineSettings], Runner], Callable[[], EngineSettings]]] = {
    "gguf": (gguf_runner, lambda: DEMO),
    "hybrid": (gguf_runner, lambda: stateful("hybrid")),
    "recurrent": (gguf_runner, lambda: stateful("recurrent")),
    "window": (gguf_runner, lambda: stateful("window")),
    "onnx": (load_onnx, lambda: ONNX),
    "onnx-gqa": (load_onnx, lambda: msgspec.structs.replace(ONNX, model=str(gqa_demo()))),
    "sim": (SimRunner, lambda: EngineSettings(model="cpu-0.5b-q8_0", engine="sim")),
}


def config_of(kind: str, asked: EngineSettings) -> EngineConfig:
    """Returns the configuration of an engine that is started with these settings. Raises ModelError."""
    load, _ = LOADS[kind]
    runner = load(asked)
    try:
        return runner.config
    finally:
        runner.close()


def sizes(config: EngineConfig) -> tuple[object, ...]:
    return (
        config.context_length,
        config.max_num_seqs,
        config.kv_block_size,
        config.total_kv_blocks,
        config.kv_tokens,
        config.kv_bytes,
        config.host_kv_blocks,
        config.checkpoint_sizes,
        config.max_num_batched_tokens,
    )


@pytest.mark.parametrize("kind", LOADS)
@settings(max_examples=10)
@given(
    context=st.sampled_from((0, 2, 100, 512, 1_000)),
    kv_tokens=st.sampled_from((0, 40, 100, 300, 1_024, 5_000)),
    block_size=st.sampled_from((-1, 1, 16, 24, 300)),
    num_seqs=st.sampled_from((-1, 1, 3, 8)),
    limit_kib=st.sampled_from((0, 0, 8, 64, 300, 4_000)),
)
def test_every_engine_that_starts_is_replaced_by_one_of_the_same_sizes(
    kind: str, context: int, kv_tokens: int, block_size: int, num_seqs: int, limit_kib: int
) -> None:
    asked = msgspec.structs.replace(
        LOADS[kind][1](),
        context_length=context,
        kv_tokens=kv_tokens,
        kv_block_size=block_size,
        max_num_seqs=num_seqs,
        kv_limit_bytes=limit_kib << 10,
    )
    with contextlib.suppress(ModelError):
        first = config_of(kind, asked)
        successor = successor_settings(asked, first)
        try:
            second = config_of(kind, successor)
        except ModelError as error:
            raise AssertionError(f"a restart fails: {error}") from error
        assert sizes(second) == sizes(first)
        assert successor_settings(successor, second) == successor, "and so has the one after it"


def test_each_engine_that_died_while_it_was_loading_leaves_half_of_the_memory_to_plan_with() -> None:
    asked = EngineSettings(model="m", memory_share=0.5)
    assert [cautious_settings(asked, deaths).memory_share for deaths in range(3)] == [0.5, 0.25, 0.125]
