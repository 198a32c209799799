"""The processes that render chat templates for this one."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path


def renderers() -> set[int]:
    """Returns the ids of those that run."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"prompt.renderer_process" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


async def ended(pid: int) -> None:
    """Returns when a process has ended."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    found = asyncio.Event()
    asyncio.get_running_loop().add_reader(end, found.set)
    try:
        await asyncio.wait_for(found.wait(), 60)
    finally:
        asyncio.get_running_loop().remove_reader(end)
        os.close(end)
