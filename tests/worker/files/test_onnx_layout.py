"""An ONNX model is found in every layout; if nothing decides between several, the error says what to do."""

import json
from pathlib import Path

import pytest

from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.layouts import OnnxLayout, is_onnx_model
from tokenbus.worker.files.model_files import ModelFiles
from tokenbus.worker.models.registry import served_name

COMMUNITY = [
    "onnx/model.onnx",
    "onnx/model.onnx_data",
    "onnx/model_bnb4.onnx",
    "onnx/model_fp16.onnx",
    "onnx/model_fp16.onnx_data",
    "onnx/model_fp16.onnx_data_1",
    "onnx/model_int8.onnx",
    "onnx/model_q4.onnx",
    "onnx/model_q4.onnx_data",
    "onnx/model_q4f16.onnx",
    "onnx/model_q4f16.onnx_data",
    "onnx/model_quantized.onnx",
    "onnx/model_uint8.onnx",
    "config.json",
    "tokenizer.json",
]
"""The files of a repository of onnx-community."""


def lay(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def find(model: Path, *, on_gpu: bool = False) -> ModelFiles:
    return OnnxLayout(on_gpu=on_gpu).find(model)


def choose(names: list[str], quant: str = "", *, on_gpu: bool = False) -> str:
    return OnnxLayout(on_gpu=on_gpu).choose(names, quant, "org/m")


# folders


def test_optimums_folder_has_its_graph_at_its_root_with_the_small_files_beside_it(tmp_path: Path) -> None:
    lay(tmp_path, "model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "vocab.json")
    found = find(tmp_path)
    assert found.weights == tmp_path / "model.onnx"
    assert set(found.sidecars) == {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_folder_of_several_precisions_gives_the_one_that_the_device_is_quickest_with(
    tmp_path: Path, on_gpu: bool
) -> None:
    found = find(lay(tmp_path, *COMMUNITY), on_gpu=on_gpu)
    assert found.weights == tmp_path / "onnx" / ("model_q4f16.onnx" if on_gpu else "model_q4.onnx")
    assert set(found.sidecars) == {"config.json", "tokenizer.json"}


def test_a_graph_at_the_root_comes_before_the_same_one_in_the_subfolder(tmp_path: Path) -> None:
    assert find(lay(tmp_path, "onnx/model.onnx", "model.onnx")).weights == tmp_path / "model.onnx"


def test_a_file_that_is_named_is_that_file_with_its_folders_small_files(tmp_path: Path) -> None:
    lay(tmp_path, *COMMUNITY)
    found = find(tmp_path / "onnx" / "model_int8.onnx")
    assert found.weights == tmp_path / "onnx" / "model_int8.onnx"
    assert found.sidecars["tokenizer.json"] == tmp_path / "tokenizer.json"
    lay(tmp_path / "flat", "m.onnx", "tokenizer.json")
    assert find(tmp_path / "flat" / "m.onnx").sidecars == {"tokenizer.json": tmp_path / "flat" / "tokenizer.json"}


def test_the_demo_model_is_laid_out_as_published_ones_are() -> None:
    found = find(demo.ONNX_PATH)
    assert found.weights == demo.ONNX_PATH / "onnx" / "model.onnx"
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= set(found.sidecars)


def test_a_folder_without_a_graph_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no ONNX file; name a file or a folder with one"):
        find(lay(tmp_path, "config.json", "deep/down/model.onnx"))


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.onnx: there is no such file"):
        find(tmp_path / "none.onnx")


def test_several_graphs_with_no_rule_between_them_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"several models \(a\.onnx, b\.onnx\); name one of them"):
        find(lay(tmp_path, "a.onnx", "b.onnx"))


def test_model_files_travel_in_settings_and_back(tmp_path: Path) -> None:
    found = find(lay(tmp_path, *COMMUNITY))
    assert ModelFiles.from_paths(found.to_paths()) == found


# genai_config.json


def genai(folder: Path, config: object) -> Path:
    (folder / "genai_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_the_builders_folder_names_its_graph_itself(tmp_path: Path) -> None:
    lay(tmp_path, "a.onnx", "phi3-int4-cpu.onnx")
    found = find(genai(tmp_path, {"model": {"type": "phi3", "decoder": {"filename": "phi3-int4-cpu.onnx"}}}))
    assert found.weights == tmp_path / "phi3-int4-cpu.onnx"
    assert "genai_config.json" in found.sidecars


def test_a_builders_folder_that_names_no_graph_is_like_any_other(tmp_path: Path) -> None:
    assert find(genai(lay(tmp_path, "m.onnx"), {"model": {}})).weights == tmp_path / "m.onnx"


@pytest.mark.parametrize("name", ["../outside.onnx", "/etc/passwd", "deep/../../outside.onnx"])
def test_a_graph_that_the_builders_file_has_outside_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    lay(tmp_path, "outside.onnx", "in/m.onnx", "in/deep/x")
    with pytest.raises(ModelError, match=r"genai_config\.json: its file .* is not in its folder"):
        find(genai(tmp_path / "in", {"model": {"decoder": {"filename": name}}}))


def test_a_graph_that_the_builders_file_names_and_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.onnx: there is no such file"):
        find(genai(lay(tmp_path, "m.onnx"), {"model": {"decoder": {"filename": "gone.onnx"}}}))


@pytest.mark.parametrize("text", ["{", '{"model": 3}', '{"model": {"decoder": {"filename": 3}}}', "\ud800"])
def test_a_builders_file_that_is_wrong_is_named(tmp_path: Path, text: str) -> None:
    lay(tmp_path, "m.onnx")
    (tmp_path / "genai_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"genai_config\.json: .*; correct or remove it"):
        find(tmp_path)


# precisions


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("model.onnx", ""),
        ("onnx/model_q4f16.onnx", "q4f16"),
        ("onnx/model_Q4.onnx", "q4"),
        ("onnx/decoder_model_merged.onnx", ""),
        ("onnx/decoder_model_merged_int8.onnx", "int8"),
        ("phi3-int4-cpu.onnx", "phi3-int4-cpu"),
    ],
)
def test_a_name_says_its_precision(name: str, precision: str) -> None:
    assert OnnxLayout().variant_of(name) == precision


def test_a_precision_that_was_asked_for_is_taken_on_any_device() -> None:
    graphs = [name for name in COMMUNITY if name.endswith(".onnx")]
    for on_gpu in (False, True):
        assert choose(graphs, "int8", on_gpu=on_gpu) == "onnx/model_int8.onnx"
        assert choose(graphs, "FP16", on_gpu=on_gpu) == "onnx/model_fp16.onnx"


def test_a_precision_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ModelError, match="org/m: there is no q8, only full precision, q4"):
        choose(["onnx/model.onnx", "onnx/model_q4.onnx"], "q8")


@pytest.mark.parametrize(
    ("names", "host", "gpu"),
    [
        (["model.onnx", "model_fp16.onnx"], "model.onnx", "model_fp16.onnx"),
        (["model.onnx", "model_int8.onnx", "model_quantized.onnx"], "model.onnx", "model.onnx"),
        (["model.onnx", "model_q8.onnx"], "model_q8.onnx", "model.onnx"),
        (["model_fp16.onnx", "model_q4f16.onnx"], "model_fp16.onnx", "model_q4f16.onnx"),
        (["model_bnb4.onnx", "model_q4.onnx"], "model_q4.onnx", "model_q4.onnx"),
        (["decoder_model_merged.onnx", "decoder_model_merged_q4.onnx"], *["decoder_model_merged_q4.onnx"] * 2),
    ],
)
def test_of_two_precisions_each_device_has_its_own(names: list[str], host: str, gpu: str) -> None:
    assert choose(names) == host
    assert choose(names, on_gpu=True) == gpu


def test_one_graph_is_taken_whatever_it_is_called() -> None:
    assert choose(["strange.onnx"]) == "strange.onnx"


def test_graphs_that_are_not_served_by_themselves_do_not_count() -> None:
    others = ["encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx", "embed_tokens_q4.onnx"]
    assert choose([*others, "vision_encoder.onnx", "decoder_model_merged.onnx"]) == "decoder_model_merged.onnx"
    with pytest.raises(ModelError, match="there is no ONNX file"):
        choose(others)


# the Hub


def test_a_repositorys_graph_comes_with_all_files_of_its_weights_and_no_others() -> None:
    host, gpu = OnnxLayout(on_gpu=False), OnnxLayout(on_gpu=True)
    assert host.select(COMMUNITY, "", "org/m") == ["onnx/model_q4.onnx", "onnx/model_q4.onnx_data"]
    assert gpu.select(COMMUNITY, "", "org/m") == ["onnx/model_q4f16.onnx", "onnx/model_q4f16.onnx_data"]
    assert gpu.select(COMMUNITY, "int8", "org/m") == ["onnx/model_int8.onnx"]
    assert host.select(COMMUNITY, "fp16", "org/m") == [
        "onnx/model_fp16.onnx",
        "onnx/model_fp16.onnx_data",
        "onnx/model_fp16.onnx_data_1",
    ]
    assert host.select(["model.onnx", "model.onnx.data"], "", "org/m") == ["model.onnx", "model.onnx.data"]


def test_a_repository_without_a_graph_is_refused_by_its_name() -> None:
    with pytest.raises(ModelError, match="org/m: there is no ONNX file"):
        OnnxLayout(on_gpu=False).select(["m.gguf", "config.json"], "", "org/m")


# names


def test_an_onnx_model_is_told_from_a_gguf_by_its_files(tmp_path: Path) -> None:
    for folder, names, is_onnx in (
        ("root", ["m.onnx"], True),
        ("sub", ["onnx/m.onnx"], True),
        ("both", ["m.onnx", "m.gguf"], False),
        ("gguf", ["m.gguf"], False),
        ("empty", ["config.json"], False),
    ):
        assert is_onnx_model(str(lay(tmp_path / folder, *names))) is is_onnx, folder
    assert is_onnx_model("nowhere/m.onnx")
    assert not is_onnx_model("nowhere/m.gguf")
    assert not is_onnx_model("org/repo")


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("onnx-community/Qwen2.5-0.5B-Instruct-ONNX", "qwen2.5-0.5b-instruct"),
        ("onnx-community/Qwen2.5-0.5B-Instruct-ONNX:q4f16", "qwen2.5-0.5b-instruct"),
        ("onnx-community/gemma-3-270m-it-onnx", "gemma-3-270m-it"),
        ("/data/Qwen2.5/onnx/model_q4.onnx", "qwen2.5"),
        ("/data/Phi-3/model.onnx", "phi-3"),
        ("/data/SmolLM2-ONNX", "smollm2-onnx"),
        (str(demo.ONNX_PATH), "demo-onnx"),
        (str(demo.ONNX_PATH / "onnx" / "model.onnx"), "demo-onnx"),
    ],
)
def test_a_model_is_called_after_its_folder_or_repository(model: str, served: str) -> None:
    assert served_name(model) == served
