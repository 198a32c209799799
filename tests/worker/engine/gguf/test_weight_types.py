"""What a checkpoint becomes, and what is said of a file's type, follows from llama.cpp's code for the processor."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import safetensors_model
from tests.support.engines import DEMO, gguf_runner
from tests.support.models import random_model
from tests.support.models.shape import PRESETS
from tokenbus.worker.convert import converted
from tokenbus.worker.engine.gguf import backend, model_facts, runner, weight_types
from tokenbus.worker.files.number_types import BF16, F16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, NumberType
from tokenbus.worker.replica.replica import successor_settings

AVX2 = frozenset({"AVX", "AVX2", "F16C", "FMA", "LLAMAFILE", "OPENMP", "REPACK"})
AVX512 = AVX2 | {"AVX512", "AVX512_VNNI"}
WITH_BF16 = AVX512 | {"AVX512_BF16"}
ARM = frozenset({"NEON", "ARM_FMA", "FP16_VA", "DOTPROD", "LLAMAFILE", "REPACK"})
ARM_WITH_I8MM = ARM | {"MATMUL_INT8", "SVE"}
UNKNOWN = frozenset({"VSX", "LLAMAFILE"})
K_TYPE, TERNARY = 12, 34


@pytest.mark.parametrize("features", [WITH_BF16, WITH_BF16 | {"AMX_INT8"}])
def test_bf16_stays_bf16_where_the_processor_multiplies_it(features: frozenset[str]) -> None:
    assert weight_types.best_conversion("bf16", features) == "bf16"


@pytest.mark.parametrize("features", [frozenset(), AVX2, AVX512, ARM, ARM_WITH_I8MM, UNKNOWN])
def test_bf16_becomes_f16_on_every_other_processor(features: frozenset[str]) -> None:
    assert weight_types.best_conversion("bf16", features) == "f16"


@pytest.mark.parametrize("published", ["f32", "f16", ""])
def test_what_was_published_more_exactly_never_becomes_bf16(published: str) -> None:
    assert weight_types.best_conversion(published, WITH_BF16) == "f16"


@pytest.mark.parametrize(
    ("kind", "features", "instead"),
    [
        (Q4_1, AVX2, "Q4_1: Q4_0 or Q8_0"),
        (Q4_1, WITH_BF16, "Q4_1: Q4_0 or Q8_0"),
        (Q4_1, ARM, "Q4_1: Q4_0 or Q8_0"),
        (Q5_1, WITH_BF16, "Q5_1: Q5_0 or Q8_0"),
        (Q5_1, ARM_WITH_I8MM, "Q5_1: Q8_0"),
        (Q5_0, ARM_WITH_I8MM, "Q5_0: Q4_0 or Q8_0"),
        (BF16, ARM_WITH_I8MM, "BF16: F16"),
    ],
)
def test_a_type_that_is_multiplied_row_by_row_is_named_with_those_that_are_not(
    kind: NumberType, features: frozenset[str], instead: str
) -> None:
    said = weight_types.slow_weights({kind.ggml: 1_000}, features)
    assert said == f"{instead} would compute prompts 1.5 to 2 times as fast on this processor"


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        *((kind.ggml, AVX2) for kind in (F32, F16, BF16, Q8_0, Q5_0, Q4_0)),
        *((kind, features) for kind in (K_TYPE, TERNARY) for features in (AVX2, ARM)),
        *((kind.ggml, ARM_WITH_I8MM) for kind in (F16, Q8_0, Q4_0, Q4_1)),
        (Q4_1.ggml, WITH_BF16 | {"AMX_INT8"}),
    ],
)
def test_nothing_is_said_of_a_type_that_is_fast_or_has_no_equal(kind: int, features: frozenset[str]) -> None:
    assert weight_types.slow_weights({kind: 1_000}, features) == ""


@pytest.mark.parametrize("features", [frozenset(), UNKNOWN, frozenset({"SSE3"}), AVX2 - {"LLAMAFILE"}])
def test_nothing_is_said_of_processors_without_anything_faster(features: frozenset[str]) -> None:
    assert weight_types.slow_weights({Q4_1.ggml: 1_000, Q5_1.ggml: 1_000}, features) == ""


def test_the_most_of_the_weights_decides() -> None:
    assert weight_types.slow_weights({Q8_0.ggml: 500, Q4_1.ggml: 500}, AVX2) == ""
    assert weight_types.slow_weights({Q8_0.ggml: 499, Q4_1.ggml: 200, Q5_1.ggml: 300}, AVX2).startswith("Q5_1: ")
    assert weight_types.slow_weights({}, AVX2) == ""


@given(
    st.dictionaries(st.integers(0, 60), st.integers(1, 1_000)),
    st.frozensets(st.sampled_from(sorted(WITH_BF16 | ARM_WITH_I8MM | UNKNOWN | {"AMX_INT8"}))),
)
def test_at_most_one_line_is_said_and_no_slow_type_recommended(sizes: dict[int, int], features: frozenset[str]) -> None:
    said = weight_types.slow_weights(sizes, features)
    assert "\n" not in said
    for kind in (F16, Q8_0, Q5_0, Q4_0):
        if f" {kind.name.upper()} " in said:
            assert weight_types.slow_weights({kind.ggml: 1}, features) == ""


def test_a_processor_has_the_features_that_llama_cpp_reports_of_it_and_no_gpu_s() -> None:
    line = (
        "CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : AVX2 = 1 | SVE_CNT = 32 | AVX512 = 0 | REPACK = 1 | RPC : A = 1 | "
    )
    assert backend.parse_features(line) == {"AVX2", "SVE_CNT", "REPACK"}
    assert backend.parse_features("") == frozenset()


def test_llama_cpp_here_reports_features() -> None:
    assert backend.processor_features()


@pytest.mark.parametrize("kind", [Q4_0, Q8_0])
def test_the_matrices_of_layers_are_counted_by_type(tmp_path: Path, kind: NumberType) -> None:
    path = tmp_path / "tiny.gguf"
    random_model.write(path, PRESETS["tiny"], kind.name, threads=1)
    counted = model_facts.matrix_types(path)
    assert max(counted, key=lambda one: counted[one]) == kind.ggml


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a checkpoint in BF16."""
    monkeypatch.setattr(converted.constants, "HF_HOME", str(tmp_path / "cache"))
    made = safetensors_model.write_demo(tmp_path / "tiny")
    safetensors_model.write_bf16(made)
    return made


def test_workers_on_different_processors_share_a_cache_and_make_one_fleet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for features in (WITH_BF16, AVX512):
        monkeypatch.setattr(backend, "processor_features", lambda features=features: features)
        first = gguf_runner(msgspec.structs.replace(DEMO, model=str(folder)))
        second = gguf_runner(successor_settings(msgspec.structs.replace(DEMO, model=str(folder)), first.config))
        assert second.config.files == first.config.files
        seen.append((Path(first.config.files["weights"]).name, {first.config.fingerprint, second.config.fingerprint}))
        first.close()
        second.close()
    (fast, of_fast), (default, of_default) = seen
    assert (fast[-10:], default[-9:]) == ("-BF16.gguf", "-F16.gguf")
    assert of_fast == of_default
    assert len(of_fast) == 1


@pytest.mark.parametrize(("kind", "features"), [("f16", WITH_BF16), ("bf16", AVX2), ("q8_0", WITH_BF16)])
def test_the_type_that_a_user_names_is_taken_on_every_processor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, features: frozenset[str]
) -> None:
    monkeypatch.setattr(backend, "processor_features", lambda: features)
    made = gguf_runner(msgspec.structs.replace(DEMO, model=str(folder), quantize=kind))
    assert made.config.files["weights"].endswith(f"-{kind.upper()}.gguf")
    assert "fingerprint" not in made.config.files
    made.close()


def test_what_a_gpu_may_compute_becomes_f16(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "processor_features", lambda: WITH_BF16)
    monkeypatch.setattr(runner.llama, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(backend, "all_devices", dict)
    for devices, kind in ((("none",), "BF16"), ((), "F16")):
        made = gguf_runner(msgspec.structs.replace(DEMO, model=str(folder), devices=devices))
        assert made.config.files["weights"].endswith(f"-{kind}.gguf")
        made.close()


def test_an_engine_says_that_its_weights_are_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "processor_features", lambda: AVX2)
    path = tmp_path / "tiny.gguf"
    random_model.write(path, PRESETS["tiny"], "q4_1", threads=1)
    for model, said in ((path, "Q4_1: "), (Path(DEMO.model), "")):
        made = gguf_runner(msgspec.structs.replace(DEMO, model=str(model)))
        assert made.config.slow_weights[:6] == said
        made.close()
