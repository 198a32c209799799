"""A process may limit what it takes of the machine's memory."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory a process has")


def run(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", f"from tokenbus.protocol.process import memory\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()


def test_an_allocation_beyond_the_limit_fails_and_mapped_files_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    code = """
import mmap, sys
memory.limit_own(64 << 20)
with open(sys.argv[1], "rb") as file:
    weights = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(len(weights), len(bytearray(16 << 20)))
try:
    bytearray(128 << 20)
except MemoryError:
    print("refused")
memory.limit_own(32 << 20)
print("again")
"""
    assert run(code, str(path)) == [str(1 << 30), str(16 << 20), "refused", "again"]


def test_a_process_may_offer_itself_if_memory_runs_out() -> None:
    code = "memory.end_first(); print(open('/proc/self/oom_score_adj').read())"
    assert run(code) == ["1000"]
