"""Brings the packages that others wrote into the cache: sources of suites, environments of Python, folders of Node.

Nothing of them is in the repository. Versions are pinned in `packages/`; changed pins make a new folder."""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from deploy import llama_cpp_wheel

PINS = Path(__file__).parent / "packages"
_TIMEOUT_S = 600


class InstallError(RuntimeError):
    """A package could not be brought. The message says which, and why."""


def environment(name: str) -> Path:
    """Returns the folder of programs of a virtual environment with the packages of `packages/NAME.txt`."""
    pins = PINS / f"{name}.txt"
    with _made(name, pins.read_bytes()) as (folder, is_new):
        if is_new:
            _run([sys.executable, "-m", "venv", str(folder)])
            # llama-cpp-python is the wheel that workers use, which takes minutes to compile
            links = ["--find-links", str(llama_cpp_wheel.cache_folder(llama_cpp_wheel.VERSION))]
            _run([str(folder / "bin/pip"), "install", "-q", *links, "-r", str(pins)])
    return folder / "bin"


def source(package: str, pinned_in: str, part: str = "") -> Path:
    """Returns the unpacked source, or only a folder of it, of a package of `packages/NAME.txt`, as it was published."""
    pins = [re.sub(r"\[.*?\]", "", line) for line in _pinned(pinned_in)]  # without extras
    pin = next(one for one in pins if one.startswith(f"{package}=="))
    with _made(f"{package}-source" if part else package, f"{pin}{part}".encode()) as (folder, is_new):
        if is_new:
            folder.mkdir()
            fetch = [str(environment("fetching") / "unearth"), "--no-binary", "--download", str(folder)]
            _run([*fetch, pin])
            (archive,) = folder.glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                wanted = [one for one in packed if one.name.partition("/")[2].startswith(part)]
                packed.extractall(folder, wanted, filter="data")
            archive.unlink()
    (root,) = (path for path in folder.iterdir() if path.is_dir())
    return root


def node_modules(name: str) -> Path:
    """Returns the folder with the packages of `packages/NAME/package.json`. Scripts beside them can import them."""
    pins = PINS / name / "package.json"
    with _made(name, pins.read_bytes()) as (folder, is_new):
        if is_new:
            folder.mkdir()
            shutil.copy(pins, folder)
            _run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], folder)
    return folder


def has_node() -> bool:
    return shutil.which("node") is not None and shutil.which("npm") is not None


def _pinned(name: str) -> list[str]:
    lines = (PINS / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if "==" in line and not line.startswith("#")]


@contextlib.contextmanager
def _made(name: str, pins: bytes) -> Iterator[tuple[Path, bool]]:
    """Yields a folder for these pins, and whether it is still to be made. One process makes it, others wait."""
    root = os.environ.get("TOKENBUS_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(root).expanduser() / "tokenbus" / "third-party"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{name}-{hashlib.sha256(pins).hexdigest()[:12]}"
    ready = folder.with_suffix(".ready")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_new = not ready.exists()
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run has left
        yield folder, is_new
        ready.touch()


def _run(command: list[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise InstallError(f"{' '.join(command)}: {done.stderr.strip()[-2_000:]}")
