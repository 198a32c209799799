"""What the Hub, or a folder laid out like its cache, names leads to no other file."""

from pathlib import Path

import pytest

from tokenbus.worker.files.layouts import GgufLayout
from tokenbus.worker.models import hub


@pytest.mark.parametrize("named", ["a" * 40, "0123456789abcdef" * 4])
def test_a_digest_names_a_file_of_the_cache(named: str) -> None:
    assert hub._digest(named) == named


@pytest.mark.parametrize("named", [None, "", "../" * 13 + "x", "a" * 39, "A" * 40, "a" * 63 + "/", "a" * 40 + "\n"])
def test_what_is_no_digest_names_none(named: str | None) -> None:
    assert hub._digest(named) == ""


def test_removing_a_model_removes_no_file_outside_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    mine, snapshot = tmp_path / "mine", tmp_path / "hub" / "models--org--repo" / "snapshots" / "abc"
    blobs = tmp_path / "hub" / "models--org--repo" / "blobs"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    mine.write_bytes(b"mine")
    (blobs / "1").write_bytes(b"blob")
    (snapshot / "m-Q8_0.gguf").symlink_to("../../blobs/1")
    (snapshot / "m-Q4_0.gguf").symlink_to(mine)
    for variant in ("Q8_0", "Q4_0"):
        hub.remove(f"org/repo:{variant}", (GgufLayout(),))
    assert not (blobs / "1").exists()
    assert not list(snapshot.iterdir())
    assert mine.read_bytes() == b"mine"
