"""A GGUF model is found by file, folder or Hub name; if nothing decides between several, the error says what to do."""

from pathlib import Path

import pytest

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.layouts import GgufLayout
from tokenbus.worker.files.model_files import ModelFiles, is_hub_name
from tokenbus.worker.models.registry import served_name


def files(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def found(model: Path) -> ModelFiles:
    return GgufLayout().find(model)


def test_a_file_is_itself_with_the_small_files_beside_it(tmp_path: Path) -> None:
    files(tmp_path, "m.gguf", "other.gguf", "config.json", "generation_config.json", "README.md")
    one = found(tmp_path / "m.gguf")
    assert one.weights == tmp_path / "m.gguf"
    assert one.sidecars == {name: tmp_path / name for name in ("config.json", "generation_config.json")}


def test_a_folder_with_one_model_is_that_model(tmp_path: Path) -> None:
    files(tmp_path, "m.gguf", "mmproj-m.gguf", "imatrix.gguf", "notes.txt")
    assert found(tmp_path).weights == tmp_path / "m.gguf"


def test_of_several_quantizations_the_preferred_one_is_taken(tmp_path: Path) -> None:
    files(tmp_path, "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-f16.gguf")
    assert found(tmp_path).weights == tmp_path / "m-Q4_K_M.gguf"


def test_several_models_with_no_rule_between_them_are_refused_by_name(tmp_path: Path) -> None:
    files(tmp_path, "a.gguf", "b.gguf")
    with pytest.raises(ModelError, match=r"several models \(a\.gguf, b\.gguf\); name one of them"):
        found(tmp_path)


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no GGUF file"):
        found(files(tmp_path, "config.json"))


@pytest.mark.parametrize("given", [1, 2, 3])
def test_a_split_model_is_loaded_from_its_first_part_whichever_is_named(tmp_path: Path, given: int) -> None:
    files(tmp_path, *(f"m-Q4_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)))
    assert found(tmp_path / f"m-Q4_0-0000{given}-of-00003.gguf").weights.name == "m-Q4_0-00001-of-00003.gguf"
    assert found(tmp_path).weights.name == "m-Q4_0-00001-of-00003.gguf"


def test_of_many_missing_parts_the_first_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-99999.gguf"
    path.touch()
    with pytest.raises(ModelError, match=r"m-00002-of-99999\.gguf, .* and 99,958 more is not there") as raised:
        GgufLayout().find(path)
    assert len(str(raised.value)) < 2_000


def test_a_message_is_no_longer_than_a_reply_may_be() -> None:
    assert str(ModelError("x" * 8_000)) == "x" * 8_000
    assert str(ModelError("x" * 8_001)) == "x" * 8_000 + "..."


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    files(tmp_path, "m-00001-of-00003.gguf", "m-00003-of-00003.gguf")
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is not there; fetch all 3 parts"):
        found(tmp_path)


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Qwen2.5-0.5B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "Q8_0"),
        ("m-IQ2_XXS.gguf", "IQ2_XXS"),
        ("m-bf16-00001-of-00002.gguf", "BF16"),
        ("sub/m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("plain.gguf", "plain"),
    ],
)
def test_a_name_says_its_quantization(name: str, quant: str) -> None:
    assert GgufLayout().variant_of(name) == quant


def test_a_quantization_is_found_however_it_is_written_and_its_absence_names_the_others() -> None:
    names = ["m-Q4_0.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    assert GgufLayout().choose(names, "q8_0", "org/m") == "m-Q8_0-00001-of-00002.gguf"
    with pytest.raises(ModelError, match="org/m: there is no Q2_K, only Q4_0, Q8_0"):
        GgufLayout().choose(names, "Q2_K", "org/m")


@pytest.mark.parametrize(
    ("model", "is_hub", "served"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct-GGUF", True, "qwen2.5-0.5b-instruct"),
        ("Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_0", True, "qwen2.5-0.5b-instruct"),
        ("models/m.gguf", False, "m"),
        ("m.gguf", False, "m"),
        ("/data/M-Q4_0-00001-of-00002.gguf", False, "m-q4_0"),
        ("a/b/c", False, "c"),
    ],
)
def test_a_hub_name_is_told_from_a_path(model: str, is_hub: bool, served: str) -> None:
    assert is_hub_name(model) is is_hub
    assert served_name(model) == served


def test_a_folder_that_looks_like_a_hub_name_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    files(tmp_path / "org" / "repo", "m.gguf")
    assert not is_hub_name("org/repo")
    assert found(Path("org/repo")).weights == Path("org/repo/m.gguf")


def test_model_files_travel_in_settings_and_back(tmp_path: Path) -> None:
    one = found(files(tmp_path, "m.gguf", "config.json"))
    assert ModelFiles.from_paths(one.to_paths()) == one
    assert ModelFiles.from_paths({}) is None
