"""A process may let others use the processors first."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_a_process_that_goes_last_is_nice_and_so_are_those_that_it_starts() -> None:
    code = """
import os, subprocess, sys
from tokenbus.protocol.process import priority
before = os.nice(0)
priority.go_last()
started = subprocess.run([sys.executable, "-c", "import os; print(os.nice(0))"], capture_output=True, text=True)
print(os.nice(0) - before, int(started.stdout) - before)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()
    assert told == ["10", "10"]


@pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="this system shares processors among processes only"
)
@pytest.mark.parametrize("has_own_session", [False, True])
def test_the_session_of_others_stays_as_it_is(has_own_session: bool) -> None:
    code = """
import os, pathlib, subprocess, sys
group = pathlib.Path("/proc/self/autogroup")
before = group.read_text()
code = "from tokenbus.protocol.process import priority; priority.go_last(); print(open('/proc/self/autogroup').read())"
own = {"start_new_session": sys.argv[1] == "own"}
started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, **own)
print(before == group.read_text(), started.stdout.split()[-1])
"""
    words = [sys.executable, "-c", code, "own" if has_own_session else "shared"]
    told = subprocess.run(words, capture_output=True, check=True, text=True, start_new_session=True).stdout.split()
    assert told == ["True", "10" if has_own_session else "0"]
