"""The log files of `tokenbus up`: a folder for each run, of which the last ones are kept, and no file grows forever."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

KEPT_RUNS = 5
"""Runs whose logs are kept, with this one; those of a run that has not ended are always kept."""
MAX_LOG_BYTES = 8 << 20
"""Bytes of a log file after which its lines move to a second file, in the place of those that were there."""
_LOCK = ".lock"
_SECOND = ".1"


class RunLogs:
    """The folder of this run's logs, and a lock by which other runs see that it has not ended."""

    def __init__(self, folder: Path, lock: BinaryIO, problem: str = "") -> None:
        self.folder = folder
        self.problem = problem
        """Why they are not where they should be; empty if they are."""
        self._lock = lock

    def __repr__(self) -> str:
        return f"<RunLogs {self.folder}>"

    @classmethod
    def create(cls, home: Path) -> "RunLogs":
        """Creates a folder below `home` and removes those of earlier runs. If that is impossible, the folder is a
        temporary one. Raises OSError if there is no place for that either."""
        problem = ""
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%dT%H-%M-%S-"), dir=home))
        except OSError as error:
            problem = f"{home}: {error.strerror}"
            folder = Path(tempfile.mkdtemp(prefix="tokenbus-"))
        lock = (folder / _LOCK).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not problem:
            _remove_earlier(home)
        return cls(folder, lock, problem)

    def shorten(self, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Empties log files that are too long, after copying them: processes hold them open, and append. A line written
        between the two is lost, and the whole file if there is no room for its copy."""
        for path in self.folder.glob("*.log"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > max_bytes:
                    second = path.with_name(path.name + _SECOND)
                    try:
                        shutil.copyfile(path, second)
                    except OSError:
                        second.unlink(missing_ok=True)
                    os.truncate(path, 0)

    def close(self) -> None:
        """Lets later runs remove these logs."""
        self._lock.close()


def _remove_earlier(home: Path) -> None:
    """Removes the folders of all runs but the last ones, whose names are in the order of their starts."""
    runs = sorted(path for path in home.iterdir() if (path / _LOCK).exists())
    for path in runs[:-KEPT_RUNS]:
        if not _is_running(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(run: Path) -> bool:
    try:
        with (run / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
