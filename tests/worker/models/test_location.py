"""A folder for the Hub's models is named for this process and those that it starts, if anything can be kept there."""

import os
from pathlib import Path

import pytest

from tokenbus.worker.models import folders


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests set ends with them."""
    for name in (folders.HUB_CACHE_VARIABLE, "HF_HUB_CACHE"):
        monkeypatch.setenv(name, "")


def test_the_library_is_told_by_its_own_variable(tmp_path: Path) -> None:
    folders.use_hub_cache(str(tmp_path / "models"))
    assert os.environ["HF_HUB_CACHE"] == os.environ[folders.HUB_CACHE_VARIABLE] == str(tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_no_name_changes_nothing() -> None:
    folders.use_hub_cache("")
    assert os.environ["HF_HUB_CACHE"] == ""


def test_a_folder_of_the_user_s_home_can_be_named_like_in_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folders.use_hub_cache("~/models")
    assert os.environ["HF_HUB_CACHE"] == str(tmp_path / "models")


def test_a_file_is_refused_also_where_a_folder_is_to_be_made_below_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for named in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(ValueError, match=f"--hub-cache {named}: {tmp_path / 'file'} is not a directory"):
            folders.use_hub_cache(str(named))
    assert os.environ["HF_HUB_CACHE"] == ""


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may write anywhere
    with pytest.raises(ValueError, match=f"this user may not write to {tmp_path}: name another folder"):
        folders.use_hub_cache(str(tmp_path / "models"))
