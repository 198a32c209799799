"""Downloads a model from the Hugging Face Hub into the Hub's cache.

The variables HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply, as in every program that uses `huggingface_hub`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import structlog
from huggingface_hub import errors as hub_errors
from tqdm.auto import tqdm

from tokenbus.worker.engine.runner import ModelError

Progress = Callable[[float], None]
Select = Callable[[list[str], str, str], list[str]]
"""Returns which files of a repository to download, the one to load first, from their names, the variant that was asked
for and the repository's name. Raises ModelError if it can't decide."""
_CONVERTED_SUFFIXES = ("-GGUF", "-gguf", "-ONNX", "-onnx")
"""Suffixes by which repositories of converted weights are named after the original ones."""


def fetch(
    name: str, progress: Progress, select: Select, wanted_sidecars: tuple[str, ...]
) -> tuple[Path, dict[str, Path]]:
    """Downloads `org/repo` or `org/repo:variant`. Returns the file to load, and the sidecars by name.

    Raises ModelError, saying what to do."""
    repo, _, variant = name.partition(":")
    try:
        names, base = _list_files(repo)
        parts = select(names, variant, repo)
        structlog.get_logger().info("fetching_model", repo=repo, file=parts[0], parts=len(parts))
        paths = [
            _download(repo, part, lambda share, done=done: progress((done + share) / len(parts)))  # type: ignore[misc]
            for done, part in enumerate(parts)
        ]
        sidecars = {one: _download(repo, one) for one in wanted_sidecars if one in names}
        for one in wanted_sidecars:  # conversions often leave out files that the original repository has
            if base is not None and one not in sidecars and (path := _try_download(base, one)) is not None:
                sidecars[one] = path
        return paths[0], sidecars
    except hub_errors.GatedRepoError as error:
        raise ModelError(f"{repo}: its terms have to be accepted on the Hub first; then set HF_TOKEN") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ModelError(f"{repo}: there is no such repository on the Hub, or HF_TOKEN may not see it") from error
    except ModelError:
        raise
    except Exception as error:  # outermost frame of a fetch: network, disk, or a repository that changes meanwhile
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{repo}: can't be fetched from the Hub: {reason}") from error


def _list_files(repo: str) -> tuple[list[str], str | None]:
    """Returns the names of a repository's files, and the repository that its weights were converted from."""
    by_name = next((repo.removesuffix(suffix) for suffix in _CONVERTED_SUFFIXES if repo.endswith(suffix)), None)
    try:
        info = huggingface_hub.model_info(repo)
    except hub_errors.RepositoryNotFoundError:
        raise
    except Exception:  # whatever the network or the library raises: the files in the cache may be enough
        return _list_cached_files(repo), by_name
    base = info.card_data.get("base_model") if info.card_data else None
    if isinstance(base, list):
        base = base[0] if base else None
    return [file.rfilename for file in info.siblings or []], base if isinstance(base, str) else by_name


def _list_cached_files(repo: str) -> list[str]:
    """Returns the files that an earlier start has downloaded. Raises ModelError if there are none."""
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
    except hub_errors.LocalEntryNotFoundError as error:
        raise ModelError(f"{repo}: the Hub can't be reached, and nothing of it is in the cache") from error
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _try_download(repo: str, name: str) -> Path | None:
    """Downloads a file that is useful but not needed; returns None if that fails."""
    try:
        return _download(repo, name)
    except Exception:  # the model can be served without the file
        return None


def _download(repo: str, name: str, progress: Progress | None = None) -> Path:
    return Path(huggingface_hub.hf_hub_download(repo, name, tqdm_class=_progress_bar(progress)))


def _progress_bar(progress: Progress | None) -> Any:
    """Returns a tqdm class that draws nothing and reports the share downloaded, from 0 to 1."""

    class ProgressBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)  # huggingface_hub passes it to its own subclass of tqdm
            # A bar that is disabled does not count.
            super().__init__(*args, **options | {"disable": False, "file": _NullFile()})

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if progress is not None and self.total:
                progress(min(1.0, self.n / self.total))

    return ProgressBar


class _NullFile:
    """A file that discards what is written to it."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
