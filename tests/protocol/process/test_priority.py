"""A process may let others use the processors first."""

import subprocess
import sys


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
