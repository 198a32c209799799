"""Counts the processor cores that this process may use."""

import os
from pathlib import Path

from tokenbus.protocol.process.control_groups import folders, text_of


def usable_cores(root: Path = Path("/")) -> int:
    """Returns how many cores this process may use, at least one: those that it may run on, within what its control
    groups allow it of their time.

    A container with a limit of 2.5 cores may run on all of a machine's 64, but threads that wait for each other in
    each step of a computation stand still together once any of them has used the limit up. So a part of a core does
    not count. `root` is where `proc` and `sys` are."""
    affinity = getattr(os, "sched_getaffinity", None)  # only Linux has it
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([cores, *_limits(root)]))


def _limits(root: Path) -> list[int]:
    """Returns the limit of each control group that has one, in whole cores."""
    version_2 = [text_of(folder / "cpu.max").split() for _, folder in folders("cpu", root, 2)]
    version_1 = [
        [text_of(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        for _, folder in folders("cpu", root, 1)
    ]
    # without a limit the first number is `max` in version 2, and -1 in version 1
    return [
        int(one[0]) // int(one[1])
        for one in (*version_2, *version_1)
        if len(one) == 2 and one[0].isdecimal() and one[1].isdecimal() and int(one[1])
    ]
