"""An adapter's file that stays readable as long as streams use it, even if it is deleted."""

import os
import resource
import stat
from pathlib import Path

_GGUF = b"GGUF"


class KeptAdapter:
    """Holds an adapter's file or folder open. This process and its engine can read it from its `path`.

    The files in a PEFT folder are not held: they can be read only as long as they are in it. The digest shows if a file
    was overwritten. If too many files are open, or on systems other than Linux, the path is the one that was given."""

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
        """Closes the file. Safe to call again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _open(path: str) -> int | None:
    """Opens a folder or a GGUF file; any other file needs its name. Returns None for those, and if opening fails or
    more than half of this process's descriptors would be in use."""
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
