"""A worker's flags make its settings: devices are shared by all replicas, or each has its own."""

import sys
from pathlib import Path

import pytest

from tokenbus.cli import main
from tokenbus.cli.commands import worker
from tokenbus.cli.console.flags import Parser, UsageError
from tokenbus.demo import MODEL_PATH, ONNX_PATH
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.process import main as engine_main
from tokenbus.worker.settings.settings import WorkerSettings


def settings(*flags: str) -> WorkerSettings:
    parser = Parser("worker")
    worker.add_flags(parser)
    return worker.settings_of(parser.parse_args(["--model", "demo", *flags]))


def run_worker(model: str) -> object:
    options = main.parse(["worker", "--model", model, "--nats", "nats://127.0.0.1:1"])
    return options.run(options)


def test_devices_that_are_given_once_are_those_of_every_replica() -> None:
    (model,) = settings("--replicas", "3", "--devices", "CUDA0, CUDA1").models
    assert model.replicas == 3
    assert model.engine.devices == ("CUDA0", "CUDA1")


def test_without_devices_the_engine_chooses() -> None:
    (model,) = settings("--replicas", "2").models
    assert (model.replicas, model.engine.devices) == (2, ())


def test_devices_that_are_given_for_each_replica_are_its_own() -> None:
    models = settings("--model", "demo", "--replicas", "2", "--devices", "cuda:0", "--devices", "cuda:1").models
    assert [(model.served_name, model.replicas, model.engine.devices) for model in models] == [
        ("demo", 1, ("cuda:0",)),
        ("demo", 1, ("cuda:1",)),
        ("demo", 1, ("cuda:0",)),
        ("demo", 1, ("cuda:1",)),
    ]


@pytest.mark.parametrize(
    ("engine", "module", "extra"),
    [("gguf", "llama_cpp", "worker"), ("onnx", "onnxruntime", "worker-onnx"), ("onnx", "onnx", "worker-onnx")],
)
def test_without_its_engine_a_worker_ends_in_one_line_that_names_the_extra_before_there_is_a_broker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    model = str(MODEL_PATH if engine == "gguf" else ONNX_PATH)
    assert run_worker(model) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the {engine} engine needs packages that are not installed ({module}); run: pip install " in line
    assert f"'tokenbus[{extra}]'" in line


@pytest.mark.parametrize("engine", ["gguf", "onnx"])
def test_an_engine_whose_package_can_not_be_imported_is_an_error_of_the_model(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    def broken(*arguments: object) -> engine_main.Loader:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setitem(engine_main._LOADERS, engine, broken)
    with pytest.raises(ModelError, match=f"the {engine} engine is not installed, or not completely: libcudart"):
        engine_main._make_find(lambda _: None)(EngineSettings(model="m", engine=engine))


@pytest.mark.parametrize(("name", "says"), [("none.gguf", "there is no such file"), ("text", "not a GGUF file")])
def test_a_file_that_no_engine_can_serve_is_refused_before_there_is_a_broker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    (tmp_path / "text").write_text("no model")
    assert run_worker(str(tmp_path / name)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("replicas", ["1", "3"])
def test_devices_for_another_number_of_replicas_are_refused(replicas: str) -> None:
    with pytest.raises(ValueError, match="--devices was given 2 times: give it once, or once for each of the"):
        settings("--replicas", replicas, "--devices", "a", "--devices", "b")


def test_an_empty_name_of_a_device_is_refused() -> None:
    with pytest.raises(UsageError, match="--devices must be names with commas between them, got 'CUDA0,'"):
        settings("--devices", "CUDA0,")


def test_a_file_in_place_of_a_folder_for_the_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat.gguf").write_text("a model that follows --keep-cache without a folder")
    with pytest.raises(UsageError, match="--keep-cache must be a folder, got"):
        settings("--keep-cache", str(tmp_path / "chat.gguf"))
    assert settings(f"--keep-cache={tmp_path}").models[0].engine.keep_cache == str(tmp_path)


def test_with_a_memory_budget_all_models_but_the_pinned_ones_are_loaded_on_demand() -> None:
    names = ("--served-name", "a", "--model", "demo", "--served-name", "b")
    made = settings(*names, "--pin", "b", "--memory-budget-mib", "9")
    assert {model.served_name: model.on_demand for model in made.models} == {"a": True, "b": False}
    assert made.memory_budget_bytes == 9 << 20
    assert made.models[0].engine.host_cache_mib == 0, "what is kept for later goes with the model"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--pin", "demo"), "--pin needs --memory-budget-mib"),
        (("--pin", "other", "--idle-unload-s", "1"), "--pin other: is not served here"),
        (("--replicas", "2", "--memory-budget-mib", "9"), "--replicas and --kv-budget are not for models on demand"),
        (("--model", "demo", "--memory-budget-mib", "9"), "need names of their own"),
    ],
)
def test_flags_that_contradict_models_on_demand_are_refused(flags: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        settings(*flags)


@pytest.mark.parametrize("name", ["cache-type-k", "cache-type-v", "flash-attention", "split-mode"])
def test_a_setting_that_no_engine_knows_is_refused_before_anything_is_tried_with_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"--{name} must be .* or .*, got q6_0"):
        settings(f"--{name}", "q6_0")


def test_the_folder_for_models_of_the_hub_is_a_setting_whose_variable_all_commands_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settings("--hub-cache", "/models").hub_cache == "/models"
    monkeypatch.setenv("TOKENBUS_HUB_CACHE", "/of-all")
    assert main.parse(["worker", "--model", "demo"]).hub_cache == "/of-all"
    assert main.parse(["pull", "org/repo"]).hub_cache == "/of-all"
    monkeypatch.setenv("TOKENBUS_WORKER_HUB_CACHE", "/of-workers")
    assert main.parse(["worker", "--model", "demo"]).hub_cache == "/of-workers"
    assert main.parse(["worker", "--model", "demo", "--hub-cache", "/given"]).hub_cache == "/given"
