"""Which engine serves a model, whether that is installed, where its files are, and what it is called."""

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import gguf_metadata
from tokenbus.worker.files.gguf_layout import GgufLayout, stem_of
from tokenbus.worker.files.model_files import Layout, ModelFiles, is_hub_name
from tokenbus.worker.files.onnx_layout import OnnxLayout, is_onnx_model, model_folder
from tokenbus.worker.files.safetensors_layout import SafetensorsLayout
from tokenbus.worker.models.find import find as find_model

_PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "gguf": {"llama_cpp": ("llama-cpp-python",)},
    "onnx": {"onnxruntime": ("onnxruntime-gpu", "onnxruntime"), "onnx": ("onnx",)},
}
"""The modules that an engine imports, and the packages that have them: with CUDA first, then without."""
_NAME = re.compile(r"[\w-]+")


def engine_of(model: str) -> str:
    """Returns the engine for a model from its files; names on the Hub are taken for GGUF."""
    return "onnx" if is_onnx_model(model) else "gguf"


def check(model: str, engine: str = "auto") -> None:
    """Checks that a model's engine is installed, and, for one on this machine, that its files are there. Nothing is
    imported or downloaded. Raises ModelError, saying what to do."""
    engine = engine_of(model) if engine == "auto" else engine
    for module, distributions in _PACKAGES.get(engine, {}).items():
        if importlib.util.find_spec(module) is None:
            requirement = _requirement(distributions)
            name = _NAME.match(requirement)
            raise ModelError(
                f"{model}: the {engine} engine needs the package {name.group() if name else requirement}, which is not "
                f"installed; run: pip install '{requirement}'"
            )
    if engine == "sim" or is_hub_name(model):
        return
    found = find_model(model, layouts(engine), lambda _: None)
    if engine == "gguf" and found.weights.suffix != ".safetensors":
        gguf_metadata.check(found.weights)


def _requirement(distributions: tuple[str, ...]) -> str:
    """Returns the package to install of those that have a module, in the versions that Tokenbus wants here."""
    try:
        wanted = importlib.metadata.requires("tokenbus") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    of_interest = [one for one in wanted if (name := _NAME.match(one)) and name.group() in distributions]
    has_cuda = sys.platform == "linux" and platform.machine() == "x86_64"
    chosen = of_interest[0 if has_cuda else -1] if of_interest else distributions[0 if has_cuda else -1]
    return chosen.partition(";")[0].strip()


def layouts(engine: str) -> tuple[Layout, ...]:
    """Returns the layouts of the models that an engine serves, the first one for a model that none recognises.

    `auto` is GGUF, since names on the Hub are taken for that."""
    return (OnnxLayout(),) if engine == "onnx" else (GgufLayout(), SafetensorsLayout())


def find(model: str, progress: Callable[[float], None]) -> ModelFiles:
    """Finds a model as the engine that serves it on a CPU would. Raises ModelError, saying what to do, if it can't."""
    return find_model(model, layouts(engine_of(model)), progress)


def served_name(model: str) -> str:
    """Returns the default name of a model on the wire: its repository, folder or file in lower case."""
    if is_hub_name(model):
        repository = model.partition(":")[0].rpartition("/")[2]
        return repository.lower().removesuffix("-gguf").removesuffix("-onnx")
    path = Path(model)
    name = model_folder(path).resolve().name if path.suffix == ".onnx" else stem_of(path.name)
    return name.lower()
