"""What a broker of `tokenbus up` stores needs room on the disk, which is said before it is missed."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenbus.cli.console import store_room

MIB = 1 << 20


@pytest.mark.parametrize(("free_mib", "audit_mib", "needed_mib"), [(1_365, 0, 1_366), (2_730, 1_024, 2_731)])
def test_what_is_missing_is_told_with_the_place_and_with_what_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_mib: int, audit_mib: int, needed_mib: int
) -> None:
    free = {"mib": free_mib}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free["mib"] * MIB))
    said = store_room.shortage(tmp_path / "not/there/yet", audit_mib * MIB)
    assert f"three quarters of what is free in {tmp_path}/not/there/yet: make {needed_mib:,} MiB free there" in said
    assert f"(it is {free_mib:,}), or set XDG_STATE_HOME to a folder of another disk" in said
    free["mib"] = needed_mib
    assert store_room.shortage(tmp_path, audit_mib * MIB) == ""


def test_a_broker_that_has_stored_something_has_its_room(tmp_path: Path) -> None:
    assert not store_room.is_used(tmp_path / "broker")
    (tmp_path / "broker/jetstream/$G/streams").mkdir(parents=True)
    assert not store_room.is_used(tmp_path / "broker")
    (tmp_path / "broker/jetstream/$G/streams/KV_tokenbus_v1_keys").mkdir()
    assert store_room.is_used(tmp_path / "broker")
