"""Loads an ONNX model and makes a replica of it."""

from collections.abc import Callable

from tokenbus.worker.engine.models import model_files
from tokenbus.worker.engine.onnx import layout, settings_resolution
from tokenbus.worker.engine.onnx.encoder_runner import EncoderRunner
from tokenbus.worker.engine.onnx.graphs.session import choose_device
from tokenbus.worker.engine.onnx.model import OnnxModel, model_key
from tokenbus.worker.engine.onnx.runner import OnnxRunner
from tokenbus.worker.engine.process.loaded_models import LoadedModels
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import Runner


def load(settings: EngineSettings, progress: Callable[[float], None], models: LoadedModels[OnnxModel]) -> Runner:
    """A runner over a model that replicas share. `progress` is told how much is loaded, from 0 to 1.

    Raises ModelError when the files can't be served, and for settings that the model or the machine can't meet."""
    settings_resolution.validate(settings)
    device = choose_device(settings)
    found = model_files.from_paths(settings.files) or layout.find(settings.model, device.kind != "cpu", progress)
    model = models.acquire(model_key(found, settings, device), lambda: OnnxModel(found, settings, device))
    try:
        make = EncoderRunner if model.graph.logits is None else OnnxRunner
        return make(model, settings, device, lambda: models.release(model))
    except BaseException:
        models.release(model)
        raise
