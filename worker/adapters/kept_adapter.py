"""An adapter's file that stays readable for as long as streams use it, even if it is deleted."""

import os
import resource
import stat
from pathlib import Path

_GGUF = b"GGUF"


class KeptAdapter:
    """Holds an adapter's file or folder open. From its `path`, this process and its engine can read it.

    The files in a folder of PEFT are not held: they can be read for as long as they are in it. A file that is written
    over holds other contents; the digest tells. Where too many files are open, or on other systems than Linux, the path
    is the one that was given."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = None
        if Path("/proc/self/fd").is_dir():
            self._fd = _open(path)
        if self._fd is not None:
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def __repr__(self) -> str:
        return f"<KeptAdapter {self.path}>"

    def close(self) -> None:
        """Lets go of the file. Safe to call again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _open(path: str) -> int | None:
    """Opens a folder, or a file in GGUF: the names of others matter. Returns None for any other file, and if that can't
    be done or takes the second half of the descriptors that this process may have."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    if fd < most and (is_folder or os.pread(fd, len(_GGUF), 0) == _GGUF):
        return fd
    os.close(fd)
    return None
