"""The models in the Hub's cache: listing and removal.

```
models--ORG--REPO/refs/main                 the name of a snapshot
                  snapshots/COMMIT/NAME  ─▶  blobs/DIGEST
                  blobs/DIGEST.incomplete   the part of a file received so far
```
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import model_files
from tokenbus.worker.files.model_files import Layout

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
    for blob in blobs - left:
        blob.unlink(missing_ok=True)


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("blobs/*") if path.is_file())
