"""Fetches a model from the Hugging Face Hub into its cache, by its variables HF_HOME, HF_TOKEN, HF_HUB_OFFLINE."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import huggingface_hub
import structlog
from huggingface_hub import errors as hub_errors
from tqdm.auto import tqdm

from tokenbus.worker.engine.models import model_files
from tokenbus.worker.engine.runner import ModelError


class RepoLayout(Protocol):
    """Which files of a repository make up a model."""

    sidecars: tuple[str, ...]
    """Small files that are fetched where there are such."""

    def select(self, names: list[str], quant: str, where: str) -> list[str]:
        """Of all the names those to fetch, the one to load first. Raises ModelError where nothing decides."""
        ...


def fetch(name: str, progress: Callable[[float], None], layout: RepoLayout) -> model_files.ModelFiles:
    """The files of `org/repo` or `org/repo:quant`. Raises ModelError, saying what to do."""
    repo, _, quant = name.partition(":")
    try:
        return _fetch(repo, quant, progress, layout)
    except hub_errors.GatedRepoError as error:
        raise ModelError(f"{repo}: asks for its terms to be accepted on the Hub; then set HF_TOKEN") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ModelError(f"{repo}: there is no such repository on the Hub, or HF_TOKEN may not see it") from error
    except ModelError:
        raise
    except Exception as error:  # outermost frame of a fetch: network, disk, or a repository that changes meanwhile
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{repo}: can't be fetched from the Hub: {reason}") from error


def _fetch(repo: str, quant: str, progress: Callable[[float], None], layout: RepoLayout) -> model_files.ModelFiles:
    names, base = _list_files(repo)
    parts = layout.select(names, quant, repo)
    structlog.get_logger().info("fetching_model", repo=repo, file=parts[0], parts=len(parts))
    paths = [
        _download(repo, part, lambda share, done=done: progress((done + share) / len(parts)))  # type: ignore[misc]
        for done, part in enumerate(parts)
    ]
    sidecars = {name: _download(repo, name) for name in layout.sidecars if name in names}
    if base is not None:
        for name in layout.sidecars:
            path = None if name in sidecars else _try_download(base, name)
            if path is not None:
                sidecars[name] = path
    return model_files.ModelFiles(paths[0], sidecars)


def _list_files(repo: str) -> tuple[list[str], str | None]:
    """The names of a repository's files, and of the repository that its weights were converted from."""
    try:
        info = huggingface_hub.model_info(repo)
    except hub_errors.RepositoryNotFoundError:
        raise
    except Exception:  # whatever the network or its library says: what is in the cache may do
        return _list_cached_files(repo), _base_from_name(repo)
    base = info.card_data.get("base_model") if info.card_data else None
    if isinstance(base, list):
        base = base[0] if base else None
    return [file.rfilename for file in info.siblings or []], base if isinstance(base, str) else _base_from_name(repo)


def _list_cached_files(repo: str) -> list[str]:
    """What an earlier start has fetched: enough where the Hub can't be reached now."""
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
    except hub_errors.LocalEntryNotFoundError as error:
        raise ModelError(f"{repo}: the Hub can't be reached, and nothing of it is in the cache") from error
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _base_from_name(repo: str) -> str | None:
    for ending in ("-GGUF", "-gguf", "-ONNX", "-onnx"):
        if repo.endswith(ending):
            return repo.removesuffix(ending)
    return None


def _try_download(repo: str, name: str) -> Path | None:
    """A file that would be good to have; None where it is not there, or anything else keeps it from us."""
    try:
        return _download(repo, name)
    except Exception:  # as its docstring says
        return None


def _download(repo: str, name: str, progress: Callable[[float], None] | None = None) -> Path:
    return Path(huggingface_hub.hf_hub_download(repo, name, tqdm_class=_progress_bar(progress)))


def _progress_bar(progress: Callable[[float], None] | None) -> Any:
    """A progress bar that draws nothing and tells its share instead."""

    class ProgressBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **options | {"disable": False, "file": _NullFile()})

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if progress is not None and self.total:
                progress(min(1.0, self.n / self.total))

    return ProgressBar


class _NullFile:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
