"""Loads an ONNX model and makes a replica of it."""

from collections.abc import Callable

from tokenbus.worker.engine.models import weights
from tokenbus.worker.engine.onnx import choices
from tokenbus.worker.engine.onnx.graphs import files
from tokenbus.worker.engine.onnx.graphs.session import choose_device
from tokenbus.worker.engine.onnx.model import OnnxModel, key_of
from tokenbus.worker.engine.onnx.runner import OnnxRunner
from tokenbus.worker.engine.onnx.tokenizer.encoder import EncoderRunner
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.process.sharing import Models
from tokenbus.worker.engine.runner import Runner


def load(settings: EngineSettings, progress: Callable[[float], None], models: Models[OnnxModel]) -> Runner:
    """A runner over a model that replicas share. `progress` is told how much is loaded, from 0 to 1.

    Raises ModelError when the files can't be served, and for settings that the model or the machine can't meet."""
    choices.check(settings)
    device = choose_device(settings)
    found = weights.from_files(settings.files) or files.find(settings.model, device.kind != "cpu", progress)
    model = models.use(key_of(found, settings, device), lambda: OnnxModel(found, settings, device))
    try:
        make = EncoderRunner if model.graph.logits is None else OnnxRunner
        return make(model, settings, device, lambda: models.release(model))
    except BaseException:
        models.release(model)
        raise
