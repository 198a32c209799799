"""The logs of the last runs of `tokenbus up`."""

import stat
from pathlib import Path

import pytest

from tokenbus.cli.console.run_logs import KEPT_RUNS, RunLogs


def earlier(home: Path, number: int) -> Path:
    """A run that has ended."""
    folder = home / f"2026-01-{number:02}T00-00-00-x"
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    (folder / "router.log").write_text("text")
    return folder


def test_the_logs_of_the_last_runs_are_kept(tmp_path: Path) -> None:
    runs = [earlier(tmp_path, number) for number in range(1, KEPT_RUNS + 3)]
    now = RunLogs.create(tmp_path)
    assert sorted(tmp_path.iterdir()) == [*runs[-(KEPT_RUNS - 1) :], now.folder]
    now.close()


def test_logs_of_a_run_that_has_not_ended_are_kept(tmp_path: Path) -> None:
    oldest = RunLogs.create(tmp_path)
    oldest.folder.rename(tmp_path / "2025-old")
    for number in range(1, KEPT_RUNS + 1):
        earlier(tmp_path, number)
    RunLogs.create(tmp_path).close()
    assert (tmp_path / "2025-old").exists()
    oldest.close()
    RunLogs.create(tmp_path).close()
    assert not (tmp_path / "2025-old").exists()


def test_nothing_but_runs_is_removed(tmp_path: Path) -> None:
    for number in range(KEPT_RUNS + 2):
        (tmp_path / f"2020-notes-{number}").mkdir()
    RunLogs.create(tmp_path).close()
    assert len(list(tmp_path.glob("2020-notes-*"))) == KEPT_RUNS + 2


def test_only_its_user_can_read_them(tmp_path: Path) -> None:
    logs = RunLogs.create(tmp_path / "state/logs")
    assert stat.S_IMODE(logs.folder.stat().st_mode) == 0o700
    logs.close()


def test_without_a_place_in_the_state_folder_they_are_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "state").write_text("a file")
    logs = RunLogs.create(tmp_path / "state")
    assert logs.folder.parent == tmp_path
    assert logs.problem == f"{tmp_path / 'state'}: File exists"
    logs.close()


def test_a_log_that_grows_is_bounded_while_its_process_appends(tmp_path: Path) -> None:
    logs = RunLogs.create(tmp_path)
    path = logs.folder / "router.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"first\n")
        logs.shorten(max_bytes=6)
        assert path.read_bytes() == b"first\n"
        log.write(b"second\n")
        logs.shorten(max_bytes=6)
        log.write(b"third\n")
    assert path.read_bytes() == b"third\n"
    assert path.with_name("router.log.1").read_bytes() == b"first\nsecond\n"
    logs.close()


def test_where_there_is_no_room_for_a_copy_the_lines_are_given_up(tmp_path: Path) -> None:
    logs = RunLogs.create(tmp_path)
    (logs.folder / "router.log.1").symlink_to("/dev/full")
    (logs.folder / "router.log").write_bytes(b"x" * 100)
    logs.shorten(max_bytes=6)
    assert (logs.folder / "router.log").read_bytes() == b""
    logs.close()
