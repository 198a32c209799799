"""An ONNX model is loaded with sizes that fit, and not at all where nothing does."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.support.engines import gqa_demo
from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelTooLargeError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.memory.claims import MemoryClaims
from tokenbus.worker.engine.memory.planner import MemoryPlanner
from tokenbus.worker.engine.onnx import device as devices
from tokenbus.worker.engine.onnx import graph
from tokenbus.worker.engine.onnx.device import Device
from tokenbus.worker.engine.onnx.model import OnnxMemory, OnnxModel
from tokenbus.worker.engine.onnx.runner import OnnxRunner, load
from tokenbus.worker.files import device_memory, model_config
from tokenbus.worker.files.device_memory import DeviceMemory, HostLimit
from tokenbus.worker.replica.replica import successor_settings

MIB = 1 << 20
TOKEN_BYTES = 2 * 4 * 2 * 32 * 4


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how much memory the machine has free, in MiB, of 4,096."""

    def set_mib(free: int) -> None:
        monkeypatch.setattr(device_memory, "host_limits", lambda *_: [HostLimit("", 4_096 * MIB, free * MIB)])

    monkeypatch.setattr("tokenbus.worker.engine.memory.claims.resident_bytes", lambda pid: 0)
    return set_mib


def settings(folder: Path | None = None, **changes: object) -> EngineSettings:
    return EngineSettings(model=str(folder or gqa_demo()), engine="onnx", threads=1, **changes)  # type: ignore[arg-type]


def runner_of(asked: EngineSettings, planner: MemoryPlanner | None = None) -> OnnxRunner:
    models: LoadedModels[OnnxModel] = LoadedModels()
    runner = load(asked, lambda share: None, models, planner)
    assert isinstance(runner, OnnxRunner)
    return runner


def memory_of(folder: Path, on: Device) -> OnnxMemory:
    weights = next(folder.rglob("*.onnx"))
    model = graph.load(weights)
    config = model_config.read_onnx_config({"config.json": folder / "config.json"})
    return OnnxMemory(weights, model, graph.read(model, "demo"), config, on)


def test_without_settings_a_model_has_its_own_context_and_rows_that_share_memory(host: Callable[[int], None]) -> None:
    host(3_000)
    runner = runner_of(settings())
    config = runner.config
    assert (config.context_length, config.kv_tokens, config.max_num_seqs, runner.num_lanes) == (2_048, 8_192, 16, 24)
    assert config.memory is not None
    assert config.memory.kv_bytes == (8_192 + 2_048 + 2_048) * TOKEN_BYTES, "copies of prefixes, and inputs to embed"
    runner.close()


def test_a_plain_graph_needs_its_cache_twice(host: Callable[[int], None]) -> None:
    host(3_000)
    runner = runner_of(settings(demo.ONNX_PATH))
    assert runner.config.memory is not None
    assert runner.config.memory.kv_bytes == 2 * (8_192 + 2_048 + 2_048 + 4_096) * TOKEN_BYTES
    runner.close()


def test_with_less_memory_there_are_fewer_tokens_and_with_too_little_the_model_is_refused(
    host: Callable[[int], None],
) -> None:
    host(672)
    runner = runner_of(settings())
    assert 2_048 <= runner.config.kv_tokens < 8_192
    assert runner.config.context_length == 2_048
    runner.close()
    host(100)
    with pytest.raises(ModelTooLargeError, match="100 MiB of 4,096 MiB are free"):
        runner_of(settings())
    host(400)
    with pytest.raises(ModelTooLargeError, match=r"With --context-length 2048 or less, --kv-tokens \d+ or less"):
        runner_of(settings(kv_tokens=1_000_000))


def test_weights_in_the_graph_s_own_file_count_more_often_than_those_beside_it(tmp_path: Path) -> None:
    whole = memory_of(gqa_demo(), Device("cpu"))
    own = next(gqa_demo().rglob("*.onnx"))
    beside = sum(path.stat().st_size for path in own.parent.glob("*data"))
    assert (whole.weight_bytes, whole.loading_bytes) == (
        beside + 2 * own.stat().st_size,
        beside + 4 * own.stat().st_size,
    )
    (tmp_path / "config.json").write_bytes((gqa_demo() / "config.json").read_bytes())
    onnx.save(onnx.load(own), tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx_data")
    apart = memory_of(tmp_path, Device("cpu"))
    assert apart.weight_bytes < whole.weight_bytes or beside


def test_replicas_and_other_processes_claim_memory_and_give_it_back(
    host: Callable[[int], None], tmp_path: Path
) -> None:
    host(3_000)
    claims, other = MemoryClaims(tmp_path), MemoryClaims(tmp_path)
    limits = [HostLimit("", 4_096 * MIB, 3_000 * MIB)]
    runner = runner_of(settings(), MemoryPlanner(claims))
    memory = runner.config.memory
    assert memory is not None
    taken = memory.planned_bytes - memory.host_cache_bytes  # which comes later
    assert other.host_room(limits, "", 1.0).free_bytes == 3_000 * MIB - taken
    runner.close()
    assert other.host_room(limits, "", 1.0).free_bytes == 3_000 * MIB


def test_an_engine_that_replaces_another_has_its_sizes_whatever_is_free(host: Callable[[int], None]) -> None:
    host(800)
    first = runner_of(settings())
    successor = successor_settings(settings(), first.config)
    first.close()
    host(-1_000)
    second = runner_of(successor)
    for size in ("context_length", "kv_tokens", "max_num_seqs", "host_kv_blocks"):
        assert getattr(second.config, size) == getattr(first.config, size)
    second.close()


def test_a_gpu_has_as_many_whole_rows_as_fit_there(
    host: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    host(3_000)
    on = Device("cuda", 0)
    for free, most in ((8_192, 16 * 2_048), (96, 8_191)):
        monkeypatch.setattr(devices, "memory", lambda which, free=free: DeviceMemory("cuda:0", free * MIB, free * MIB))
        memory, planner = memory_of(gqa_demo(), on), MemoryPlanner()
        placement = planner.plan_weights(memory, settings())
        planned = planner.plan_replica(memory, placement, settings())
        assert planned.settings.kv_tokens <= most
        assert planned.memory.gpu_bytes > planned.memory.kv_bytes
        assert planned.settings.context_length * 4 <= max(planned.settings.kv_tokens, 4 * 2_048)
