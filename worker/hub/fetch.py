"""Fetches a model from the Hub, by name, into the Hub's cache.

The variables HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply, as in every program that uses `huggingface_hub`."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import structlog
from huggingface_hub import constants

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import transfer
from tokenbus.worker.files.model_files import Layout, ModelFiles
from tokenbus.worker.hub import download, repository
from tokenbus.worker.hub.repository import Repository

_SPARE_BYTES = 64 << 20
"""The disk space to leave free for everything else."""


def fetch(name: str, layouts: Sequence[Layout], on_bytes: transfer.OnBytes) -> ModelFiles:
    """Downloads `org/repo` or `org/repo:variant`, by the first layout that recognises a file of the repository.

    Raises ModelError, saying what to do."""
    repo, _, variant = name.partition(":")
    with repository.explained(repo):
        found = repository.look_up(repo)
        layout = next((one for one in layouts if any(map(one.is_weights, found.files))), layouts[0])
        parts = layout.select(found.sizes, variant, repo)
        missing = [part for part in parts if part not in found.files]
        if missing:
            raise ModelError(f"{repo}: {', '.join(missing)} is not there; choose another variant")
        structlog.get_logger().info("fetching_model", repo=repo, file=parts[0], parts=len(parts))
        _check_space(found, parts)
        weights = _download_all(found, parts, on_bytes)
        sidecars = {one: _small(found, one) for one in layout.sidecars if one in found.files}
        return ModelFiles(weights[0], sidecars | _base_sidecars(found, set(layout.sidecars) - sidecars.keys()))


def _download_all(found: Repository, parts: list[str], on_bytes: transfer.OnBytes) -> list[Path]:
    total = sum(found.files[part].size for part in parts)
    done, paths = 0, []
    for part in parts:
        paths.append(
            download.download(found.name, part, found.files[part], lambda size, done=done: on_bytes(done + size, total))  # type: ignore[misc]
        )
        done += found.files[part].size
    return paths


def _small(found: Repository, name: str) -> Path:
    return download.download(found.name, name, found.files[name], lambda size: None)


def _base_sidecars(found: Repository, wanted: set[str]) -> dict[str, Path]:
    """Downloads missing sidecars from the original repository: conversions often leave them out. None is required."""
    if found.base is None or not wanted or found.base == found.name:
        return {}
    try:
        base = repository.look_up(found.base)
    except Exception:  # the model can be served without these files
        return {}
    sidecars = {}
    for name in sorted(wanted & base.files.keys()):
        try:
            sidecars[name] = _small(base, name)
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
    if not file.digest or download.blob_path(found.name, file.digest).exists():
        return 0
    partial = download.partial_path(found.name, file.digest)
    return max(0, file.size - (partial.stat().st_size if partial.exists() else 0))
