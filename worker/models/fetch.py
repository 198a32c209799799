"""Fetches a model from the Hub, by name, into the Hub's cache; an interrupted download resumes where it stopped.

The variables HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply, as in every program that uses `huggingface_hub`. The library
starts over after a kill, and compares only sizes. So the bytes are fetched here, to where the library looks for them:
`blobs/<digest>`, under the library's own lock, so that its programs and ours wait for each other. The library then
creates links and references (decision 0060).
"""

import contextlib
import functools
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import BinaryIO

import httpx2
import huggingface_hub
import structlog
from huggingface_hub import constants
from huggingface_hub.utils._fixes import WeakFileLock
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, hf_raise_for_status

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import transfer
from tokenbus.worker.files.model_files import Layout, ModelFiles, shortened
from tokenbus.worker.models import hub
from tokenbus.worker.models.hub import RemoteFile, Repository, Tries

_SPARE_BYTES = 64 << 20
"""The disk space to leave free for everything else."""


def fetch(name: str, layouts: Sequence[Layout], on_bytes: transfer.OnBytes) -> ModelFiles:
    """Downloads `org/repo` or `org/repo:variant`, by the first layout that recognises a file of the repository.

    Raises ModelError, saying what to do."""
    repo, _, variant = name.partition(":")
    with hub.explained(repo):
        found = hub.look_up(repo)
        layout = next((one for one in layouts if any(map(one.is_weights, found.files))), layouts[0])
        parts = layout.select(found.sizes, variant, repo)
        missing = [part for part in parts if part not in found.files]
        if missing:
            raise ModelError(f"{repo}: {shortened(missing)} is not there; choose another variant")
        structlog.get_logger().info("fetching_model", repo=repo, file=parts[0], parts=len(parts))
        _check_space(found, parts)
        weights = _download_all(found, parts, on_bytes)
        total = sum(found.files[part].size for part in parts)
        small = functools.partial(_small, on_size=lambda _: on_bytes(total, total))
        sidecars = {one: small(found, one) for one in layout.sidecars if one in found.files}
        return ModelFiles(weights[0], sidecars | _base_sidecars(found, set(layout.sidecars) - sidecars.keys(), small))


def _download_all(found: Repository, parts: list[str], on_bytes: transfer.OnBytes) -> list[Path]:
    total = sum(found.files[part].size for part in parts)
    done, paths = 0, []
    for part in parts:
        paths.append(
            download(found.name, part, found.files[part], lambda size, done=done: on_bytes(done + size, total))  # type: ignore[misc]
        )
        done += found.files[part].size
    return paths


def _small(found: Repository, name: str, on_size: "OnSize") -> Path:
    return download(found.name, name, found.files[name], on_size)


def _base_sidecars(found: Repository, wanted: set[str], small: Callable[[Repository, str], Path]) -> dict[str, Path]:
    """Downloads missing sidecars from the original repository: conversions often leave them out. None is required."""
    if found.base is None or not wanted or found.base == found.name:
        return {}
    try:
        base = hub.look_up(found.base)
    except Exception:  # the model can be served without these files
        return {}
    sidecars = {}
    for name in sorted(wanted & base.files.keys()):
        try:
            sidecars[name] = small(base, name)
        except Exception:  # for example, the original is gated and its conversion is not
            return sidecars
    return sidecars


def _check_space(found: Repository, parts: list[str]) -> None:
    """Raises ModelError if the disk has too little room for what is still missing."""
    needed = sum(_missing_bytes(found, part) for part in parts)
    cache = Path(constants.HF_HUB_CACHE)
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if needed and needed + _SPARE_BYTES > free:
        problem = f"needs {transfer.size(needed)} in {cache}, where {transfer.size(free)} are free"
        raise ModelError(f"{found.name}: {problem}; remove other models, or pass --hub-cache on a larger disk")


def _missing_bytes(found: Repository, part: str) -> int:
    file = found.files[part]
    if not file.digest or blob_path(found.name, file.digest).exists():
        return 0
    partial = partial_path(found.name, file.digest)
    return max(0, file.size - (partial.stat().st_size if partial.exists() else 0))


_CHUNK_BYTES = 1 << 20
_LOCK_POLL_S = 0.5
_REPORT_S = 1.0
_SHA256_CHARS = 64

OnSize = Callable[[int], None]
"""Called with the number of bytes of the file received so far."""


class _WrongChecksumError(Exception):
    """The bytes received are not those of the file."""


def partial_path(name: str, digest: str) -> Path:
    """Returns the path of an incomplete file."""
    return hub.cache_folder(name) / "blobs" / f"{digest}.incomplete"


def blob_path(name: str, digest: str) -> Path:
    return hub.cache_folder(name) / "blobs" / digest


def download(name: str, path: str, file: RemoteFile, on_size: OnSize) -> Path:
    """Downloads a repository's file and returns its path in the cache. Raises what `repository.explained` explains."""
    if file.digest and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
        _fill_blob(name, path, file, on_size)
    found = _by_library(name, path, lambda: on_size(_received(name, file)))
    on_size(file.size)
    return found


def _by_library(name: str, path: str, on_wait: Callable[[], None]) -> Path:
    """Lets the library do what is left, which may be all. It reports nothing, so that happens on a thread, which does
    not keep this process from ending; `on_wait` is called meanwhile, and ends the wait with what it raises."""
    done: Future[str] = Future()

    def run() -> None:
        try:
            done.set_result(huggingface_hub.hf_hub_download(name, path))
        except Exception as error:  # outermost frame of a thread
            done.set_exception(error)

    threading.Thread(target=run, name="download", daemon=True).start()
    while not wait([done], timeout=_REPORT_S).done:
        on_wait()
    return Path(done.result())


def _received(name: str, file: RemoteFile) -> int:
    """Returns how many bytes of a file are here."""
    if blob_path(name, file.digest).is_file():
        return file.size
    return _size_of(partial_path(name, file.digest))


def _fill_blob(name: str, path: str, file: RemoteFile, on_size: OnSize) -> None:
    blob, partial = blob_path(name, file.digest), partial_path(name, file.digest)
    if blob.exists():
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    with _locked(name, file.digest, lambda: on_size(_size_of(partial))):
        if blob.exists():  # another process has fetched it in the meantime
            return
        url = huggingface_hub.hf_hub_url(name, path)
        with partial.open("ab+") as target:
            try:
                _Download(url, file, target, on_size).run()
            except _WrongChecksumError:
                target.truncate(0)  # what an earlier run left may have been wrong: start over once
                try:
                    _Download(url, file, target, on_size).run()
                except _WrongChecksumError as error:
                    partial.unlink()
                    problem = "the download is corrupt (its checksum differs)"
                    raise ModelError(f"{name}: {path}: {problem}; try again, or without a proxy") from error
            os.fsync(target.fileno())
        partial.rename(blob)


@contextlib.contextmanager
def _locked(name: str, digest: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the library's lock on a file; calls `on_wait` while another process has it."""
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / hub.cache_folder(name).name / f"{digest}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(WeakFileLock(lock, timeout=_LOCK_POLL_S))
                break
            except TimeoutError:
                on_wait()
        yield


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class _Download:
    """Appends the missing part of a file to `target`, over as many connections as it takes."""

    def __init__(self, url: str, file: RemoteFile, target: BinaryIO, on_size: OnSize) -> None:
        self._url = url
        self._file = file
        self._target = target
        self._on_size = on_size
        self._digest = _hasher(file)
        self._size = 0

    def __repr__(self) -> str:
        return f"<_Download {self._url} {self._size}/{self._file.size}>"

    def run(self) -> None:
        """Raises _WrongChecksumError if the complete file is not the expected one."""
        self._read_what_is_there()
        tries = Tries()
        while self._size < self._file.size:
            before = self._size
            try:
                self._receive()
                if self._size < self._file.size:
                    raise httpx2.RemoteProtocolError(f"{self._file.size - self._size} bytes are missing")
            except (httpx2.TransportError, huggingface_hub.errors.HfHubHTTPError) as error:
                if self._size > before:
                    tries.succeeded()
                tries.wait_after(error)
        self._target.flush()
        if self._size > self._file.size or self._digest.hexdigest() != self._file.digest:
            raise _WrongChecksumError

    def _read_what_is_there(self) -> None:
        self._target.seek(0)
        while chunk := self._target.read(_CHUNK_BYTES):
            self._take(chunk)
        if self._size > self._file.size:
            self._start_again()

    def _receive(self) -> None:
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if self._size:
            headers["Range"] = f"bytes={self._size}-"
        with get_session().stream(
            "GET", self._url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
        ) as response:
            if response.status_code >= 400:
                response.read()  # the bodies of errors explain them
            hf_raise_for_status(response)
            if self._size and not response.headers.get("Content-Range", "").startswith(f"bytes {self._size}-"):
                self._start_again()  # the server sends the whole file
            # Without a chunk size: the library would drop a partial chunk when the connection is cut.
            for chunk in response.iter_bytes():
                self._target.write(chunk)
                self._take(chunk)
                if self._size > self._file.size:
                    raise _WrongChecksumError

    def _take(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self._size += len(chunk)
        self._on_size(self._size)

    def _start_again(self) -> None:
        self._target.truncate(0)
        self._digest = _hasher(self._file)
        self._size = 0


def _hasher(file: RemoteFile) -> "hashlib._Hash":
    if len(file.digest) == _SHA256_CHARS:
        return hashlib.sha256()
    # git names a file by the hash of a header and its content.
    return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
