"""A GGUF model is loaded with sizes that fit, and not at all where nothing does."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from llama_cpp import llama_cpp as llama
from structlog.testing import capture_logs

from tests.architectures import tiny_model
from tests.support.engines import DEMO, gguf_runner
from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelTooLargeError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.gguf import backend, context, model_facts
from tokenbus.worker.engine.gguf.model import GgufMemory
from tokenbus.worker.engine.gguf.runner import load
from tokenbus.worker.engine.memory.claims import MemoryClaims
from tokenbus.worker.engine.memory.fit import Sizes, estimate
from tokenbus.worker.engine.memory.planner import MemoryPlanner
from tokenbus.worker.files import device_memory, gguf_metadata
from tokenbus.worker.files.device_memory import DeviceMemory, HostLimit
from tokenbus.worker.replica.replica import successor_settings

MIB = 1 << 20
PLAIN = EngineSettings(model=str(demo.MODEL_PATH), threads=1)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how much memory the machine has and has free, in MiB."""

    def set_mib(free: int) -> None:
        monkeypatch.setattr(device_memory, "host_limits", lambda *_: [HostLimit("", 4_096 * MIB, free * MIB)])

    return set_mib


def test_without_settings_a_model_has_its_own_context(host: Callable[[int], None]) -> None:
    host(3_000)
    runner = gguf_runner(PLAIN)
    assert (runner.config.context_length, runner.config.kv_tokens) == (2_048, 8_192)
    assert runner.config.memory is not None
    assert runner.config.memory.kv_bytes == runner.config.kv_bytes + 2_048 * 1_024, "and that of inputs to embed"
    assert (runner.config.memory.free_bytes >> 20, runner.config.memory.total_bytes >> 20) >= (3_000, 4_096)
    runner.close()


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(host: Callable[[int], None]) -> None:
    host(-1_000)
    shares: list[float] = []
    with pytest.raises(ModelTooLargeError, match="0 MiB of 4,096 MiB are free"):
        load(PLAIN, shares.append)
    assert not shares


def test_memory_that_is_gone_when_the_weights_are_loaded_is_a_refusal(
    host: Callable[[int], None],
) -> None:
    host(3_000)
    wide = msgspec.structs.replace(PLAIN, cache_type_k="f32", cache_type_v="f32", kv_block_size=16)
    gone = False

    def progress(share: float) -> None:
        nonlocal gone
        if not gone:
            gone = True
            host(-1_000)

    with pytest.raises(ModelTooLargeError, match="are free"):
        load(wide, progress)
    assert gone


def test_a_context_that_can_t_be_made_after_all_is_made_half_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    create = context.create

    def fail_twice(model: llama.llama_model_p, settings: EngineSettings, *, partial_state: bool) -> object:
        tried.append(settings.kv_tokens)
        if len(tried) < 3:
            raise context.ContextTooLargeError("no context could be made")
        return create(model, settings, partial_state=partial_state)

    monkeypatch.setattr(context, "create", fail_twice)
    runner = gguf_runner(PLAIN)
    assert tried == [8_192, 4_096, 2_048]
    assert (runner.config.kv_tokens, runner.config.context_length) == (2_048, 2_048)
    runner.close()
    tried.clear()
    with pytest.raises(ModelTooLargeError, match="no context could be made"):
        gguf_runner(msgspec.structs.replace(PLAIN, kv_tokens=8_192))
    assert tried == [8_192]


def test_replicas_divide_what_there_is_and_claims_end_with_them(
    host: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenbus.worker.engine.memory.claims.resident_bytes", lambda pid: 0)
    host(1_300)
    claims = MemoryClaims(tmp_path)
    planner, models = MemoryPlanner(claims), LoadedModels()  # type: ignore[var-annotated]
    runners = [
        load(msgspec.structs.replace(PLAIN, memory_parts=parts), lambda share: None, models, planner)
        for parts in (3, 2, 1)
    ]
    planned = [runner.config.memory.planned_bytes for runner in runners if runner.config.memory is not None]
    assert max(planned) - min(planned) < 40 * MIB
    weights = demo.MODEL_PATH.stat().st_size
    room = claims.host_room([HostLimit("", 4_096 * MIB, 1_300 * MIB)], "", 1.0)
    assert room.free_bytes == 1_300 * MIB - sum(planned) + 2 * weights, "they are there once"
    for runner in runners:
        runner.close()
    assert claims.host_room([HostLimit("", 4_096 * MIB, 1_300 * MIB)], "", 1.0).free_bytes == 1_300 * MIB


def test_engines_that_want_all_cores_are_told_of_each_other(
    host: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(1_300)
    monkeypatch.setattr("tokenbus.worker.engine.memory.planner.usable_cores", lambda: 4)
    monkeypatch.setattr("tokenbus.worker.engine.memory.claims._affinity", lambda pid: {0, 1, 2, 3})
    planner, models = MemoryPlanner(MemoryClaims(tmp_path)), LoadedModels()  # type: ignore[var-annotated]
    said, runners = [], []
    for threads in (0, 2, 2, 4):
        with capture_logs() as logs:
            small = msgspec.structs.replace(PLAIN, memory_parts=8, threads=threads)
            runners.append(load(small, lambda share: None, models, planner))
        said.append([(one["threads"], one["cores"]) for one in logs if one["event"] == "cores_oversubscribed"])
    for runner in runners:
        runner.close()
    assert said == [[], [], [], [(8, 4)]]


def test_an_engine_that_replaces_another_has_its_sizes_whatever_is_free(host: Callable[[int], None]) -> None:
    host(3_000)
    first = gguf_runner(PLAIN)
    successor = successor_settings(PLAIN, first.config)
    first.close()
    host(-1_000)
    second = gguf_runner(successor)
    assert (second.config.kv_tokens, second.config.host_kv_blocks) == (8_192, first.config.host_kv_blocks)
    second.close()


def test_layers_go_to_a_gpu_as_they_fit_and_the_plan_says_how_many(
    host: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    host(3_000)
    monkeypatch.setattr(llama, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(backend, "all_devices", lambda: {"CUDA0": 1})
    layers, output = model_facts.layer_bytes(demo.MODEL_PATH)
    assert len(layers) == 4
    assert sum(layers) + output <= demo.MODEL_PATH.stat().st_size * 2
    for free, placed in ((8_192, 5), (0, 0)):
        monkeypatch.setattr(
            backend, "device_memory", lambda there, free=free: [DeviceMemory("CUDA0", free * MIB, free * MIB)]
        )
        planner = MemoryPlanner()
        memory = GgufMemory(demo.MODEL_PATH, gguf_metadata.read(demo.MODEL_PATH))
        placement = planner.plan_weights(memory, PLAIN)
        assert placement.gpu_layers == placed
        planned = planner.plan_replica(
            memory, placement, msgspec.structs.replace(PLAIN, max_num_seqs=16, kv_block_size=16)
        )
        assert planned.settings.gpu_layers == planned.memory.gpu_layers == placed
        assert planned.settings.kv_tokens == (16 * 2_048 if placed else 8_192)
        assert (planned.memory.gpu_bytes > planned.memory.kv_bytes) == bool(placed)


def _mib(line: str) -> float:
    return float(line.split("size =")[1].split("MiB")[0])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "gpt-oss", "cohere2"])
def test_keys_and_values_take_what_llama_cpp_allocates_also_in_layers_with_windows(
    tmp_path: Path, architecture: str
) -> None:
    path = tmp_path / "model.gguf"
    tiny_model.write(path, architecture)
    asked = EngineSettings(
        model=str(path), max_num_seqs=4, kv_tokens=8_192, context_length=2_048, ubatch_tokens=64, pooling="none"
    )
    said: list[str] = []
    callback = llama.llama_log_callback(lambda level, text, _: said.append(text.decode()))
    backend.init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    partial_state = context.has_partial_state(model)
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        llama.llama_free(context.create(model, asked, partial_state=partial_state))
    finally:
        llama.llama_log_set(backend._log_callback, ctypes.c_void_p(0))
        llama.llama_model_free(model)
    allocated = sum(_mib(line) for line in said if "llama_kv_cache: size" in line)
    # the files name recurrent states too, which these architectures don't have
    facts = model_facts.read(gguf_metadata.read(path), 0, asked, 4)._replace(state_bytes=0)
    need = estimate(facts, asked, Sizes(2_048, 8_192, 0))
    assert need.kv_bytes / MIB == pytest.approx(allocated, rel=0.1, abs=0.1)


def test_the_demo_engine_s_memory_is_known_to_the_frontend() -> None:
    runner = gguf_runner(DEMO)
    assert runner.config.memory is not None
    assert runner.config.memory.planned_bytes > runner.config.memory.kv_bytes == (4_096 + 2_048) * 1_024
    runner.close()
