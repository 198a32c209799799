"""The Hugging Face Hub: what a repository has, with sizes and checksums, and the models in the local cache.

Every failure becomes a ModelError. A request is tried again when the Hub is busy, fails temporarily, or the connection
is lost. The cache is laid out by `huggingface_hub`:

    models--ORG--REPO/refs/main                 the name of a snapshot
                      snapshots/COMMIT/NAME  ─▶  blobs/DIGEST
                      blobs/DIGEST.incomplete   the part of a file received so far
"""

import contextlib
import errno
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import httpx2
import huggingface_hub
from huggingface_hub import constants, file_download
from huggingface_hub import errors as hub_errors

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import model_files
from tokenbus.worker.files.model_files import Layout

_CONVERTED_SUFFIXES = ("-GGUF", "-gguf", "-ONNX", "-onnx")
"""Suffixes that repositories of converted weights append to the original names."""
_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_TIMEOUT_S = 10.0
_GO_ON = "run it again: it resumes where it stopped"


class RemoteFile(NamedTuple):
    """One file of a repository."""

    size: int
    digest: str
    """The SHA-256 of a large file, or git's SHA-1 of a small one; empty if the Hub did not report it."""


class Repository(NamedTuple):
    """A repository as it is now, or the cached part of it if the Hub can't be reached."""

    name: str
    files: dict[str, RemoteFile]
    base: str | None
    """The repository that its weights were converted from."""

    @property
    def sizes(self) -> dict[str, int]:
        return {name: file.size for name, file in self.files.items()}


def look_up(name: str) -> Repository:
    """Returns a repository with its files. Raises ModelError if there is none, and the errors that `explained` does not
    convert."""
    by_name = next((name.removesuffix(suffix) for suffix in _CONVERTED_SUFFIXES if name.endswith(suffix)), None)
    try:
        info = until_answered(lambda: _info(name))
    except (httpx2.TransportError, hub_errors.OfflineModeIsEnabled) as error:
        return Repository(name, _cached_files(name, error), by_name)
    except hub_errors.HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        return Repository(name, _cached_files(name, error), by_name)
    base = info.card_data.get("base_model") if info.card_data else None
    if isinstance(base, list):
        base = base[0] if base else None
    files = {
        file.rfilename: RemoteFile(file.size or 0, _digest(file.lfs.sha256 if file.lfs else file.blob_id))
        for file in info.siblings or []
    }
    return Repository(name, files, base if isinstance(base, str) else by_name)


def _digest(named: str | None) -> str:
    """Returns a file's digest, which names a file of the cache; empty if the Hub names something else."""
    return named if named is not None and _DIGEST.fullmatch(named) else ""


def _info(name: str) -> huggingface_hub.ModelInfo:
    return huggingface_hub.model_info(name, files_metadata=True, timeout=_TIMEOUT_S)


def _cached_files(name: str, reason: Exception) -> dict[str, RemoteFile]:
    """Returns the files downloaded by an earlier run. Raises ModelError if there are none."""
    try:
        folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except hub_errors.LocalEntryNotFoundError:
        problem = f"the Hub can't be reached, and nothing of it is in the cache ({first_line(reason)})"
        raise ModelError(f"{name}: {problem}; check the network, HF_ENDPOINT and HF_HUB_OFFLINE") from reason
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): RemoteFile(path.stat().st_size, "") for path in paths}


def cache_folder(name: str) -> Path:
    """Returns the folder of a repository in the Hub's cache."""
    return Path(constants.HF_HUB_CACHE) / file_download.repo_folder_name(repo_id=name, repo_type="model")


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns anything that a lookup or a download raises into a ModelError that says what to do."""
    try:
        yield
    except ModelError:
        raise
    except hub_errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{name}"
        raise ModelError(f"{name}: its terms have to be accepted at {page} first; then set HF_TOKEN") from error
    except hub_errors.RepositoryNotFoundError as error:
        problem = "there is no such repository on the Hub, or it is private and HF_TOKEN has no access to it"
        raise ModelError(f"{name}: {problem}; check the name") from error
    except hub_errors.HfHubHTTPError as error:
        raise ModelError(f"{name}: {_refusal(error)}") from error
    except httpx2.TransportError as error:
        problem = f"the connection to the Hub was lost ({first_line(error)})"
        raise ModelError(f"{name}: {problem}; {_GO_ON}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = f"the disk of {constants.HF_HUB_CACHE} is full; free some space and {_GO_ON}"
            raise ModelError(f"{name}: {problem}") from error
        raise ModelError(f"{name}: can't be kept in {constants.HF_HUB_CACHE}: {first_line(error)}") from error
    except Exception as error:  # outermost frame of a fetch: anything else that the Hub's library raises
        raise ModelError(f"{name}: can't be fetched from the Hub: {first_line(error)}") from error


def _refusal(error: hub_errors.HfHubHTTPError) -> str:
    status = error.response.status_code
    if status == 401:
        return "the Hub does not accept HF_TOKEN; set a valid one, or none"
    if status == 429:
        return "the Hub says there were too many requests; wait a few minutes, or set HF_TOKEN for a higher limit"
    if status >= 500:
        return f"the Hub fails at the moment (status {status}); {_GO_ON}"
    return f"the Hub refuses it (status {status}): {first_line(error)}"


def first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


_MAX_TRIES = 8
"""The number of consecutive tries that may make no progress."""
_MAX_WAIT_S = 8.0
_MAX_ASKED_WAIT_S = 60.0
"""The longest wait that a server may ask for; asking for more is an error, which says so."""
_FIRST_WAIT_S = 0.2
_TRANSIENT = (408, 429, 500, 502, 503, 504)
ResultT = TypeVar("ResultT")


class Tries:
    """Counts consecutive tries that made no progress."""

    def __init__(self) -> None:
        self._failed = 0

    def __repr__(self) -> str:
        return f"<Tries: {self._failed} failed>"

    def succeeded(self) -> None:
        self._failed = 0

    def wait_after(self, error: Exception) -> None:
        """Waits before another try. Re-raises the error if it is not retryable or the retries are used up."""
        self._failed += 1
        asked_s = _asked_wait_s(error)
        if not _is_transient(error) or self._failed >= _MAX_TRIES or asked_s > _MAX_ASKED_WAIT_S:
            raise error
        time.sleep(asked_s or min(_MAX_WAIT_S, _FIRST_WAIT_S * 2 ** (self._failed - 1)))


def until_answered(ask: Callable[[], ResultT]) -> ResultT:
    """Returns the result of `ask`, retrying while that makes sense."""
    tries = Tries()
    while True:
        try:
            return ask()
        except (httpx2.TransportError, hub_errors.HfHubHTTPError) as error:
            if isinstance(error, httpx2.ConnectError):  # the Hub is unreachable: the cache may be enough
                raise
            tries.wait_after(error)


def _is_transient(error: Exception) -> bool:
    if isinstance(error, hub_errors.HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    return isinstance(error, httpx2.TransportError)


def _asked_wait_s(error: Exception) -> float:
    """Returns the seconds in `Retry-After`; 0 if absent."""
    asked = error.response.headers.get("Retry-After", "") if isinstance(error, hub_errors.HfHubHTTPError) else ""
    return float(asked) if asked.isdigit() else 0.0


_PREFIX = "models--"
_PARTIAL = ".incomplete"


class LocalModel(NamedTuple):
    """One variant of a model in the cache, or the received parts of incomplete files."""

    name: str
    """The repository."""
    variant: str
    files: tuple[Path, ...]
    """The links in snapshots, or the incomplete files."""
    is_complete: bool = True

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in {file.resolve() for file in self.files})

    @property
    def last_used(self) -> float:
        """When the weights were last read or written, in seconds since 1970. Many file systems update this once a
        day."""
        stats = [file.stat() for file in self.files]
        return max(max(stat.st_atime, stat.st_mtime) for stat in stats)

    @property
    def is_used(self) -> bool:
        return any(model_files.is_held(file) for file in self.files)


def list_models(layouts: tuple[Layout, ...]) -> list[LocalModel]:
    """Returns the models recognised by any of the engines' layouts, by name and variant."""
    folder = Path(constants.HF_HUB_CACHE)
    found = [model for repo in folder.glob(f"{_PREFIX}*") if repo.is_dir() for model in _models_in(repo, layouts)]
    return sorted(found, key=lambda model: (model.name.lower(), model.variant))


def remove(name: str, layouts: tuple[Layout, ...]) -> int:
    """Removes `org/repo`, or one variant of it (`org/repo:variant`); returns the bytes freed.

    Raises ModelError if it is not there or a worker uses it."""
    repo, _, variant = name.partition(":")
    folder = Path(constants.HF_HUB_CACHE) / (_PREFIX + repo.replace("/", "--"))
    models = list(_models_in(folder, layouts)) if folder.is_dir() else []
    chosen = [model for model in models if not variant or model.variant.lower() == variant.lower()]
    if not folder.is_dir() or (variant and not chosen):
        known = ", ".join(model.variant for model in models if model.variant)
        hint = f"it has these of {repo}: {known}" if known else "`tokenbus models --local` lists what is"
        raise ModelError(f"{name}: is not in {constants.HF_HUB_CACHE}; {hint}")
    if any(model.is_used for model in chosen):
        raise ModelError(f"{name}: a worker uses it; unload it there first")
    before = _size_of(folder)
    if not variant:
        shutil.rmtree(folder)
        return before
    for model in chosen:
        _remove_files(folder, model)
    return before - _size_of(folder)


def _models_in(folder: Path, layouts: tuple[Layout, ...]) -> Iterator[LocalModel]:
    name = folder.name.removeprefix(_PREFIX).replace("--", "/")
    files: dict[str, list[Path]] = {}
    for snapshot in sorted(folder.glob("snapshots/*")):
        for path in snapshot.rglob("*"):
            if path.is_file():
                files.setdefault(path.relative_to(snapshot).as_posix(), []).append(path)
    for layout in layouts:
        by_variant: dict[str, list[Path]] = {}
        for weights in filter(layout.is_weights, files):
            parts = [path for part in layout.parts_of(weights, files) for path in files.get(part, ())]
            by_variant.setdefault(layout.variant_of(weights), []).extend(parts)
        yield from (LocalModel(name, variant, tuple(paths)) for variant, paths in by_variant.items())
    if partial := tuple(folder.glob(f"blobs/*{_PARTIAL}")):
        yield LocalModel(name, "", partial, is_complete=False)


def _remove_files(folder: Path, model: LocalModel) -> None:
    """Removes a variant's links, and then the blobs that no other link refers to."""
    blobs = {file.resolve() for file in model.files}
    for file in model.files:
        file.unlink()
    left = {path.resolve() for path in folder.glob("snapshots/**/*")}
    own = (folder / "blobs").resolve()
    for blob in blobs - left:
        if blob.parent == own:
            blob.unlink(missing_ok=True)


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("blobs/*") if path.is_file())
