"""Which engine serves a model, where its files are, and what it is called."""

from collections.abc import Callable
from pathlib import Path

from tokenbus.worker.engine.gguf.layout import GgufLayout, stem_of
from tokenbus.worker.engine.models.model_files import Layout, ModelFiles, is_hub_name
from tokenbus.worker.engine.onnx.layout import OnnxLayout, is_onnx_model, model_folder
from tokenbus.worker.models.convert.layout import SafetensorsLayout
from tokenbus.worker.models.find import find as find_model


def engine_of(model: str) -> str:
    """Returns the engine for a model from its files; names on the Hub are taken for GGUF."""
    return "onnx" if is_onnx_model(model) else "gguf"


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
