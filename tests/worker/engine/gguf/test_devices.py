"""Devices are chosen by llama.cpp's names for them, and a wrong name is answered with the right ones."""

import contextlib
from typing import Any

import pytest

from tests.support.engines import gguf_runner
from tokenbus.demo import MODEL_PATH
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import backend, settings_resolution

THERE = {"CUDA0": 16, "CUDA1": 32}


def test_devices_are_passed_in_the_order_of_their_names_with_a_null_behind_the_last() -> None:
    assert backend.select_devices(["CUDA1", "CUDA0"], THERE) == [32, 16]
    assert list(backend.as_device_array([32, 16])) == [32, 16, None]


def test_none_is_no_device_even_where_there_are_some() -> None:
    assert backend.select_devices([backend.NO_DEVICE], THERE) == []
    assert list(backend.as_device_array([])) == [None]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["CUDA2"], "--devices must be CUDA0, CUDA1, or none, got CUDA2"),
        (["CUDA0", "none"], "--devices must be CUDA0, CUDA1, or none, got none"),
        (["CUDA0", "CUDA0"], "--devices must name each device once, got CUDA0,CUDA0"),
    ],
)
def test_names_that_cannot_be_met_are_answered_with_those_that_can(names: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=f"^{message}$"):
        backend.select_devices(names, THERE)


def test_without_a_gpu_only_none_may_be_asked_for() -> None:
    with pytest.raises(ModelError, match=r"^--devices must be none, since llama\.cpp finds no GPU, got CUDA0$"):
        backend.select_devices(["CUDA0"], {})


def test_the_cpu_is_no_device_of_its_own() -> None:
    backend.init()
    assert "CPU" not in backend.all_devices()


def test_a_model_computes_without_a_device_and_is_not_loaded_on_one_that_is_not_there() -> None:
    demo = EngineSettings(
        model=str(MODEL_PATH), devices=(backend.NO_DEVICE,), context_length=64, kv_tokens=64, threads=1
    )
    runner = gguf_runner(demo)
    runner.close()
    with pytest.raises(ModelError, match=r"--devices must be .*none.*, got Hexagon7$"):
        gguf_runner(EngineSettings(model=str(MODEL_PATH), devices=("Hexagon7",), context_length=64, kv_tokens=64))


@pytest.mark.parametrize(
    ("changes", "num_devices", "message"),
    [
        ({}, 2, ""),
        ({"cache_type_k": "q8_0", "cache_type_v": "q4_0"}, 3, ""),
        ({"split_mode": "layer", "flash_attention": "off"}, 0, ""),
        ({}, 1, "--split-mode tensor needs two GPUs or more, and there are 1; pass layer"),
        ({"flash_attention": "off"}, 2, "--split-mode tensor needs flash attention"),
        (
            {"cache_type_v": "q5_1"},
            2,
            "--cache-type-v must be one of f32, f16, bf16, q8_0, q4_0 with --split-mode tensor",
        ),
    ],
)
def test_layers_are_split_within_only_where_llama_cpp_can(
    changes: dict[str, str], num_devices: int, message: str
) -> None:
    settings = EngineSettings(model="m", **({"split_mode": "tensor"} | changes))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=f"^{message}") if message else contextlib.nullcontext():
        settings_resolution.check_tensor_split(settings, num_devices)


def test_on_a_machine_with_fewer_than_two_gpus_a_tensor_split_is_refused_before_the_model_is_loaded() -> None:
    if len(backend.all_devices()) > 1:
        pytest.skip("there are several")
    with pytest.raises(ModelError, match="--split-mode tensor needs two GPUs or more"):
        gguf_runner(EngineSettings(model=str(MODEL_PATH), split_mode="tensor", context_length=64, kv_tokens=64))


@pytest.mark.parametrize(
    ("asked", "computing"),
    [
        ({}, ["CUDA0", "CUDA1"]),
        ({"devices": ("CUDA1",)}, ["CUDA1"]),
        ({"devices": ("CUDA1", "CUDA0"), "split_mode": "none", "main_gpu": 0}, ["CUDA1"]),
        ({"split_mode": "none", "main_gpu": 1}, ["CUDA1"]),
        ({"devices": (backend.NO_DEVICE,)}, []),
        ({"devices": ("BLAS",)}, []),
    ],
)
def test_the_gpus_that_compute_a_model_are_those_that_the_settings_name(
    asked: dict[str, Any], computing: list[str]
) -> None:
    assert list(backend.computing_gpus(THERE, EngineSettings(model="m", **asked), gpu_layers=9)) == computing
    assert backend.computing_gpus(THERE, EngineSettings(model="m", **asked), gpu_layers=0) == {}


@pytest.mark.parametrize(
    ("gpus", "gpu_layers", "layers"),
    [
        ([], 9, [("host", 24)]),
        (["CUDA0"], 99, [("CUDA0", 24)]),
        (["CUDA0"], 25, [("CUDA0", 24)]),
        (["CUDA0"], 11, [("host", 14), ("CUDA0", 10)]),
        (["CUDA0"], 1, [("host", 24), ("CUDA0", 0)]),
        (["CUDA0", "CUDA1"], 11, [("host", 14), ("CUDA0", None), ("CUDA1", None)]),
    ],
)
def test_layers_are_told_where_it_is_known_which_device_has_how_many(
    gpus: list[str], gpu_layers: int, layers: list[tuple[str, int | None]]
) -> None:
    found = backend.describe_devices(dict.fromkeys(gpus, "a GPU"), 24, gpu_layers)
    assert [(one.name, one.layers) for one in found] == layers
    assert [one.description for one in found if one.kind == "gpu"] == ["a GPU"] * len(gpus)
