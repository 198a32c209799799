"""Which engine serves a model, whether that is installed, where its files are, and what it is called."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from tokenbus.protocol import extras
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import gguf_metadata, transfer
from tokenbus.worker.files.layouts import (
    GgufLayout,
    OnnxLayout,
    SafetensorsLayout,
    is_onnx_model,
    model_folder,
    stem_of,
)
from tokenbus.worker.files.model_files import Layout, ModelFiles, is_hub_name
from tokenbus.worker.models import catalog

_EXTRAS = {"gguf": "worker", "onnx": "worker-onnx"}
"""The extra that has an engine's packages."""
_LOG_INTERVAL_S = 5.0


def engine_of(model: str, asked: str = "auto") -> str:
    """Returns the engine asked for; `auto` is that of the model's files, and GGUF for names on the Hub."""
    return asked if asked != "auto" else "onnx" if is_onnx_model(model) else "gguf"


def check(model: str, engine: str = "auto") -> None:
    """Checks that a model's engine is installed, and, for one on this machine, that its files are there. Nothing is
    imported or downloaded. Raises ModelError, saying what to do."""
    engine = engine_of(model, engine)
    if extra := _EXTRAS.get(engine):
        try:
            extras.require(extra, f"{model}: the {engine} engine")
        except extras.MissingExtraError as error:
            raise ModelError(str(error)) from error
    if engine == "sim" or is_hub_name(model):
        return
    found = find_as(model, layouts(engine), lambda _: None)
    if engine == "gguf" and found.weights.suffix != ".safetensors":
        gguf_metadata.check(found.weights)


def layouts(engine: str) -> tuple[Layout, ...]:
    """Returns the layouts of the models that an engine serves, the first one for a model that none recognises.

    `auto` is GGUF, since names on the Hub are taken for that."""
    return (OnnxLayout(),) if engine == "onnx" else (GgufLayout(), SafetensorsLayout())


def find(model: str, progress: Callable[[float], None]) -> ModelFiles:
    """Finds a model as the engine that serves it on a CPU would. Raises ModelError, saying what to do, if it can't."""
    return find_as(model, layouts(engine_of(model)), progress)


def find_as(
    model: str, layouts: Sequence[Layout], progress: Callable[[float], None], *, follow_links: bool = True
) -> ModelFiles:
    """Finds a model by the first layout that recognises it, downloading it from the Hub if necessary.

    `progress` is called with the share downloaded, from 0 to 1. Raises ModelError, saying what to do, if there is no
    such model or it can't be fetched."""
    if not is_hub_name(model):
        catalog.check(model)
        path = Path(model)
        try:
            layout = next((layout for layout in layouts if layout.recognises(path)), layouts[0])
            return layout.find(path, follow_links=follow_links)
        except (OSError, ValueError) as error:
            raise ModelError(f"{model}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    from tokenbus.worker.models import fetch  # slow to import, and local models don't need it

    return fetch.fetch(model, layouts, _logged(model, progress))


def _logged(model: str, progress: Callable[[float], None]) -> transfer.OnBytes:
    """Logs the progress of a download every few seconds, and passes on the share."""
    rate, logged_at = transfer.DownloadRate(), time.monotonic()

    def on_bytes(done_bytes: int, total_bytes: int) -> None:
        nonlocal logged_at
        now = time.monotonic()
        bytes_per_s = rate.update(done_bytes, now)
        if now - logged_at >= _LOG_INTERVAL_S:
            logged_at = now
            shown = transfer.describe(done_bytes, total_bytes, bytes_per_s)
            structlog.get_logger().info("model_downloading", repo=model, progress=shown)
        progress(min(1.0, done_bytes / total_bytes) if total_bytes else 1.0)

    return on_bytes


def served_name(model: str) -> str:
    """Returns the default name of a model on the wire: its repository, folder or file in lower case."""
    if is_hub_name(model):
        repository = model.partition(":")[0].rpartition("/")[2]
        return repository.lower().removesuffix("-gguf").removesuffix("-onnx")
    path = Path(model)
    name = os.path.basename(os.path.realpath(model_folder(path))) if path.suffix == ".onnx" else stem_of(path.name)
    return name.lower()
