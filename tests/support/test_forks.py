"""Tests that run in forked processes are reported as if they had run in one."""

import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = """
import os, pytest

@pytest.fixture(scope="module")
def module():
    print("begins")
    yield
    print("ends")

def test_passes(module, tmp_path): pass
def test_fails(module):
    assert not "it says why"
@pytest.mark.skip(reason="it can not")
def test_is_skipped(): pass
def test_dies(): os._exit(0)
def test_comes_after(capfd):
    os.system("echo captured")
    assert capfd.readouterr().out == "captured\\n"
"""


@pytest.mark.parametrize("num_forks", [1, 2])
def test_each_test_is_reported_also_those_after_one_that_ends_its_process(tmp_path: Path, num_forks: int) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ("tests.support.forks",)')
    for name in ("test_one.py", "test_other.py"):
        (tmp_path / name).write_text(_TESTS)
    (tmp_path / "test_the_last.py").write_text("import os\ndef test_dies(): os._exit(0)")
    forks = (f"--forks={num_forks}", f"--rootdir={tmp_path}")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *forks, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "5 failed, 4 passed, 2 skipped" in done.stdout
    assert done.stdout.count("it says why") >= 2
    assert done.stdout.count("ended during this test") >= 3
    assert "it can not" in done.stdout
    assert done.returncode == 1
