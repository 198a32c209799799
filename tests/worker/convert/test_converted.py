"""A model in safetensors becomes the GGUF that llama.cpp's own tools would make of it, once, or says why it can't."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from tests.support import safetensors_model
from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import converted, gguf_file, process, quantize
from tokenbus.worker.files import gguf_metadata
from tokenbus.worker.files.layouts import SafetensorsLayout
from tokenbus.worker.files.model_files import ModelFiles


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(converted.constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/tokenbus/converted"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return safetensors_model.write_demo(tmp_path / "tiny")


def convert(folder: Path, kind: str = "f16") -> ModelFiles:
    return converted.convert(str(folder), SafetensorsLayout().find(folder), kind, 1, lambda share: None)


def refusal(folder: Path) -> str:
    """Returns the reason for which a model is not converted, by the code that its process runs."""
    files = SafetensorsLayout().find(folder)
    parts = [files.weights.with_name(name) for name in SafetensorsLayout().parts_of(files.weights.name)]
    sidecars = {name: str(path) for name, path in files.sidecars.items()}
    with pytest.raises(ModelError) as raised:
        process.convert(process.Job("tiny", list(map(str, parts)), sidecars, "f16", 1, str(folder / "out.gguf")))
    return str(raised.value)


def contents(path: Path) -> dict[str, object]:
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = ({tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors} for path in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.tensor_type == theirs[name].tensor_type, name
        assert np.array_equal(tensor.data, theirs[name].data), name


@pytest.mark.parametrize("shards", [1, 3])
def test_a_converted_model_is_the_gguf_of_the_same_weights_bit_by_bit(tmp_path: Path, shards: int) -> None:
    folder = safetensors_model.write_demo(tmp_path / "tiny", shards=shards)
    path = convert(folder).weights
    assert_same_tensors(path, demo.MODEL_PATH)
    ours, theirs = contents(path), contents(demo.MODEL_PATH)
    differing = {name for name, value in theirs.items() if ours.get(name) != value}
    assert differing == {"general.name"}
    assert ours["general.name"] == "tiny"


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_a_quantized_model_is_what_llama_cpp_makes_of_the_gguf(folder: Path, tmp_path: Path, kind: str) -> None:
    expected = tmp_path / "expected.gguf"
    quantize.quantize(demo.MODEL_PATH, expected, kind, 1, lambda share: None)
    files = convert(folder, kind)
    assert_same_tensors(files.weights, expected)
    assert files.weights.name.endswith(f"-{kind.upper()}.gguf")
    assert files.sidecars["generation_config.json"] == folder / "generation_config.json"


def test_weights_of_another_type_are_rounded_once(folder: Path) -> None:
    path = folder / "model.safetensors"
    halves = safetensors_model.demo_tensors()
    safetensors_model.write(path, {name: data.astype(np.float32) for name, data in halves.items()})
    assert_same_tensors(convert(folder).weights, demo.MODEL_PATH)
    brains = {name: (data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for name, data in halves.items()}
    safetensors_model.write(path, brains)
    (embedding,) = (one for one in gguf.GGUFReader(convert(folder).weights).tensors if one.name == "token_embd.weight")
    exact = (brains["model.embed_tokens.weight"].astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(embedding.data, exact.astype(np.float16))


def test_a_model_is_converted_once_and_again_when_its_files_change(folder: Path, cache: Path) -> None:
    first = convert(folder).weights
    written = first.stat()
    assert convert(folder).weights.stat() == written
    assert convert(folder, "bf16").weights != first
    safetensors_model.set_config(folder, rope_theta=20_000.0)
    assert convert(folder).weights != first
    assert len(list(cache.glob("*.gguf"))) == 3
    assert not list(cache.glob("*.incomplete"))
    assert not list(cache.glob("*.plain"))


def convert_by_choice(folder: Path, kind: str = "bf16") -> ModelFiles:
    return converted.convert_as_default(str(folder), SafetensorsLayout().find(folder), kind, 1, lambda share: None)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "llama3", "factor": 8.0}])
def test_what_a_processor_chooses_has_the_fingerprint_of_f16(
    folder: Path, cache: Path, scaling: dict[str, object] | None
) -> None:
    safetensors_model.write_bf16(folder)
    safetensors_model.set_config(folder, rope_scaling=scaling)
    chosen = convert_by_choice(folder)
    assert chosen.weights.name.endswith("-BF16.gguf")
    assert [path.name for path in cache.glob("*.gguf")] == [chosen.weights.name]
    assert not list(cache.glob("*.incomplete"))
    default = convert_by_choice(folder, "f16")
    assert default.fingerprint == ""
    assert chosen.fingerprint == gguf_metadata.read_sizes(default.weights).fingerprint
    assert chosen.fingerprint != gguf_metadata.read_sizes(chosen.weights).fingerprint
    assert convert_by_choice(folder) == chosen


def test_the_fingerprint_of_f16_is_that_of_the_file_that_is_there(folder: Path, cache: Path) -> None:
    safetensors_model.write_bf16(folder)
    default = convert(folder).weights
    with default.open("r+b") as file:  # as an older version may have written it
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert convert_by_choice(folder).fingerprint == gguf_metadata.read_sizes(default).fingerprint


def test_a_type_that_a_user_names_has_the_fingerprint_of_its_own_file(folder: Path) -> None:
    safetensors_model.write_bf16(folder)
    convert_by_choice(folder)
    assert convert(folder, "bf16").fingerprint == ""


def test_what_f16_can_not_hold_is_converted_where_the_processor_chooses_bf16(folder: Path) -> None:
    safetensors_model.write_bf16(folder, spoiled=1e6)
    assert convert_by_choice(folder).fingerprint
    with pytest.raises(ModelError, match="has values too large for f16"):
        convert(folder)


@pytest.mark.parametrize("count", [5, 70_001])
def test_a_piece_of_a_file_is_written_if_and_only_if_a_sample_needs_it(count: int) -> None:
    starts = gguf_metadata.sample_starts(1_000, 1_000 + count)
    needed = {byte for start in starts for byte in range(start, start + gguf_metadata.SAMPLE_BYTES)}
    for start in range(0, 1_000 + count, 997):
        expected = not needed.isdisjoint(range(start, start + 500))
        assert gguf_file._is_sampled(start, 500, starts) is expected


def test_a_fingerprint_travels_with_the_files(folder: Path) -> None:
    safetensors_model.write_bf16(folder)
    chosen = convert_by_choice(folder)
    assert ModelFiles.from_paths(chosen.to_paths()) == chosen
    plain = chosen._replace(fingerprint="")
    assert ModelFiles.from_paths(plain.to_paths()) == plain


def test_the_published_type_is_that_of_all_matrices(folder: Path) -> None:
    files = SafetensorsLayout().find(folder)
    assert converted.published_type(files) == "f16"
    halves = safetensors_model.demo_tensors()
    norms = {name: data for name, data in halves.items() if data.ndim == 1}
    safetensors_model.write(files.weights, halves | {name: data.astype(np.float32) for name, data in norms.items()})
    assert converted.published_type(files) == "f16"
    wide = {"model.embed_tokens.weight": halves["model.embed_tokens.weight"].astype(np.float32)}
    safetensors_model.write(files.weights, halves | wide)
    assert converted.published_type(files) == ""


def test_names_and_remarks_can_not_pass_for_a_type(folder: Path) -> None:
    files = SafetensorsLayout().find(folder)
    tensors = safetensors_model.demo_tensors()
    lie = '"dtype":"BF16","shape":[2,2]'
    header = {"__metadata__": {"format": lie, lie: "pt"}, lie: {}} | safetensors_model.header_of(tensors)
    safetensors_model.write(files.weights, tensors, header)
    assert converted.published_type(files) == "f16"
    safetensors_model.write(files.weights, tensors, {"__metadata__": {"format": lie}})
    assert converted.published_type(files) == ""


def test_what_a_killed_conversion_left_is_no_model_and_in_nobodys_way(folder: Path, cache: Path) -> None:
    files = SafetensorsLayout().find(folder)
    cache.mkdir(parents=True)
    job = process.Job(
        "tiny",
        [str(files.weights)],
        {name: str(path) for name, path in files.sidecars.items()},
        "q8_0",
        1,
        str(cache / "out.incomplete"),
    )
    script = (
        "import os, signal; from tokenbus.worker.convert import process\n"
        "process._report = lambda report: os.kill(os.getpid(), signal.SIGKILL)\n"
        "process.main()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(job) + b"\n")
        child.stdin.flush()  # and stays open: the child ends with its parent
        assert child.wait(timeout=60) == -signal.SIGKILL
    assert not list(cache.glob("*.gguf"))
    assert convert(folder, "q8_0").weights.exists()


def test_a_conversion_ends_with_its_parent() -> None:
    read, write = os.pipe()
    command = [sys.executable, "-m", "tokenbus.worker.convert.process"]
    with subprocess.Popen(command, stdin=read, stdout=subprocess.PIPE) as child:
        os.close(read)
        os.close(write)
        assert child.wait(timeout=60) != 0


def test_a_conversion_has_no_more_memory_than_its_weights_explain(folder: Path) -> None:
    safetensors_model.set_config(folder, num_attention_heads=65_536, num_key_value_heads=65_536, head_dim=4_096)
    with pytest.raises(ModelError, match="a conversion of its size needs more memory than it may have"):
        convert(folder)  # an order of its rows would take 2 GiB


def test_a_conversion_that_gets_no_further_is_ended_and_named(folder: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -ALRM $$\n")
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(converted.sys, "executable", str(python))
        with pytest.raises(ModelError, match="the conversion was ended, since it got no further for 600 s"):
            convert(folder)


def test_each_report_of_a_conversion_gives_it_time_for_the_next() -> None:
    script = (
        "import signal; from tokenbus.worker.convert import process\n"
        "process._report(process.ConversionReport())\n"
        "assert not signal.alarm(30), 'only a process for one conversion ends by itself'\n"
        "process._report(process.ConversionReport())\n"
        "assert 30 < signal.alarm(0) <= process.STALL_S"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_whatever_is_wrong_with_a_tokenizer_is_told(folder: Path) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_bytes())
    document["model"]["merges"] = [{"a": 1}]
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"tokenizer"):
        convert(folder)


def test_conversions_are_kept_in_the_folder_that_is_named_for_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENBUS_HUB_CACHE", str(tmp_path / "models"))
    assert converted.folder() == tmp_path / "models" / "tokenbus" / "converted"


def test_several_processes_that_want_a_model_wait_for_one_conversion(folder: Path, cache: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tokenbus.worker.convert import converted\n"
        "from tokenbus.worker.files.layouts import SafetensorsLayout\n"
        "files = SafetensorsLayout().find(Path(sys.argv[1])); reports = []\n"
        "print(converted.convert(sys.argv[1], files, 'f16', 1, reports.append).weights, sum(map(bool, reports)))"
    )
    variables = os.environ | {"HF_HOME": str(cache.parents[1]), "TOKENBUS_LOG": "error"}
    both = [
        subprocess.Popen([sys.executable, "-c", script, folder], env=variables, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=120)[0].splitlines()[-1].split() for process in both]
    assert len({path for path, _ in results}) == 1
    assert sorted(int(count) > 0 for _, count in results) == [False, True]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"architectures": ["FalconForCausalLM"]}, r"FalconForCausalLM is not converted here, only LlamaForCausalLM"),
        ({"architectures": None}, "an unnamed architecture is not converted here"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not converted here; use llama.cpp's convert_hf_to_gguf.py"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling longrope is not converted here"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantized by fp8"),
        ({"num_hidden_layers": 5}, "the tensor model.layers.4.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 3}, "9 tensors are unknown here, such as model.layers.3.input_layernorm.weight"),
        ({"hidden_size": 256}, r"has the shape \[640, 128\], by its config.json it is \[640, 256\]"),
        ({"num_attention_heads": 3}, "make no model"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4,096, got 1,000,000,000"),
        ({"vocab_size": 10**9}, "vocab_size must be at most 16,777,216, got 1,000,000,000"),
        ({"vocab_size": "many"}, "config.json"),
        ({"tie_word_embeddings": False}, "the tensor lm_head.weight is missing"),
    ],
)
def test_what_can_not_be_converted_exactly_is_refused_by_name(
    folder: Path, fields: dict[str, object], problem: str
) -> None:
    safetensors_model.set_config(folder, **fields)
    assert re.search(problem, refusal(folder))


def test_a_repository_without_a_tokenizer_says_so(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json beside it" in refusal(folder)


def test_a_tokenizer_that_llama_cpp_has_no_form_for_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["pre_tokenizer"] = {"type": "Whitespace"}
    path.write_text(json.dumps(document))
    assert "llama.cpp has no pre-tokenizer that cuts texts as this one does" in refusal(folder)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = safetensors_model.write_demo(tmp_path / "tiny", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is not there"):
        SafetensorsLayout().find(folder)


def test_values_that_f16_can_not_hold_are_refused(folder: Path) -> None:
    tensors = {name: data.astype(np.float32) for name, data in safetensors_model.demo_tensors().items()}
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    safetensors_model.write(folder / "model.safetensors", tensors)
    assert "has values too large for f16; pass --quantize bf16 or q8_0" in refusal(folder)


def test_a_full_disk_is_named_before_the_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 0, 1))
    with pytest.raises(ModelError, match=r"needs 1\.\d\d MB for its conversion, where 1 B are free"):
        convert(folder)
