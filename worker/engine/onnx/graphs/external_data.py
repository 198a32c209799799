"""Loads an ONNX file, and finds the files that hold weights outside of it."""

import os.path
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import TensorProto

from tokenbus.worker.contract.engine_errors import ModelError


def load(path: Path) -> onnx.ModelProto:
    """Loads the graph without external weights. Raises ModelError if it is malformed or their files are missing."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises various classes for bytes that are not a message
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path}: is no ONNX model ({reason}); fetch it again") from error
    if not all(isinstance(name, str) for name in _names(model)):
        raise ModelError(f"{path}: is no ONNX model (it has names that are no text); fetch it again")
    missing = sorted({name for name in external_files(model) if not _is_beside(path, name)})
    if missing:
        raise ModelError(f"{path}: its weights are in {', '.join(missing)}, not beside it; fetch all its files")
    return model


def external_files(model: onnx.ModelProto) -> Iterator[str]:
    """Yields the names of the weight files, as the graph has them."""
    for tensor in _tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            yield next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def resolve_external_data(model: onnx.ModelProto, folder: Path) -> Path:
    """Renames the external files in the graph to their symbolic links' targets; returns the folder that holds them all.

    onnxruntime follows no link out of a folder, and the Hub's cache consists of such links."""
    real = {name: os.path.realpath(folder / name) for name in set(external_files(model))}
    if not real:
        return folder
    common = os.path.commonpath([os.path.dirname(file) for file in real.values()])
    for tensor in _tensors(model.graph):
        for entry in tensor.external_data:
            if tensor.data_location == TensorProto.EXTERNAL and entry.key == "location":
                entry.value = Path(real[entry.value]).relative_to(common).as_posix()
    return Path(common)


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yields every node, including those in branches."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yields every weight, including constants and those in branches."""
    yield from graph.initializer
    for node in nodes(graph):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from attribute.g.initializer


def _names(model: onnx.ModelProto) -> Iterator[object]:
    """Yields the names that are compared or shown. protobuf returns a name as bytes if it is not valid text."""
    graph = model.graph
    yield from (value.name for values in (graph.input, graph.output) for value in values)
    yield from (node.op_type for node in nodes(graph))
    yield from external_files(model)


def _is_beside(path: Path, name: str) -> bool:
    """Whether a file is in the model's own folder; a name that leads out of the folder never is."""
    parts = Path(name).parts
    return bool(parts) and ".." not in parts and not Path(name).is_absolute() and os.path.isfile(path.parent / name)
