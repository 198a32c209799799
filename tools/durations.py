"""Runs pytest with the arguments it is given, and writes a table of the CPU time that each file of tests takes."""

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TIMES = Path("build/cpu_times.json")
_TABLE = Path("tests/durations.md")
_LEAST_CPU_S = 1.0
"""Files whose tests take less are not listed, and start after all that are."""

Row = tuple[str, int, float, float]


def main(arguments: list[str]) -> int:
    # Processes whose parents were killed become ours, so that the total is of all.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.cpu_times", f"--cpu-times={_TIMES}"]
    started = time.monotonic()
    pytest = subprocess.Popen([*command, *arguments]).pid
    status = 0
    while True:
        try:
            pid, ended = os.wait()
        except ChildProcessError:
            break
        if pid == pytest:
            status = os.waitstatus_to_exitcode(ended)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows: dict[str, tuple[int, float, float]] = json.loads(_TIMES.read_text())
    files = [(file, num, cpu_s, wall_s) for file, (num, cpu_s, wall_s) in rows.items()]
    _TABLE.write_text(table(files, used.ru_utime + used.ru_stime, time.monotonic() - started))
    return status


def table(files: list[Row], total_cpu_s: float, wall_s: float) -> str:
    known_s = sum(cpu_s for _, _, cpu_s, _ in files)
    return "\n".join(
        [
            "# CPU time of the tests",
            "",
            "Written by `make durations`: seconds of CPU of each test file, with all processes that it starts, and the",
            "seconds that its tests take. A fixture that several files share counts for the first of them.",
            "",
            f"{sum(num for _, num, _, _ in files):,} tests on {os.cpu_count()} cores: {total_cpu_s:,.0f} s of CPU in "
            f"{wall_s:,.0f} s; {total_cpu_s - known_s:,.0f} s of it are no file's: collecting, and ends of processes.",
            "",
            *lines("Folder", by_folder(files)),
            "",
            *lines("File", [row for row in sorted(files, key=lambda row: -row[2]) if row[2] >= _LEAST_CPU_S]),
            "",
        ]
    )


def by_folder(files: list[Row]) -> list[Row]:
    folders: dict[str, list[Row]] = defaultdict(list)
    for row in files:
        folders["/".join(row[0].split("/")[:2])].append(row)
    sums = [
        (folder, sum(row[1] for row in rows), sum(row[2] for row in rows), sum(row[3] for row in rows))
        for folder, rows in folders.items()
    ]
    return sorted(sums, key=lambda row: -row[2])


def lines(what: str, rows: list[Row]) -> list[str]:
    return [f"| {what} | tests | CPU s | s |", "|---|---|---|---|"] + [
        f"| {path} | {num:,} | {cpu_s:.1f} | {wall_s:.1f} |" for path, num, cpu_s, wall_s in rows
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
