"""Loads an ONNX model and makes a runner of it."""

from collections.abc import Callable

from tokenbus.worker.engine.models.model_files import ModelFiles
from tokenbus.worker.engine.onnx import device as devices
from tokenbus.worker.engine.onnx import settings_resolution
from tokenbus.worker.engine.onnx.encoder_runner import EncoderRunner
from tokenbus.worker.engine.onnx.layout import OnnxLayout
from tokenbus.worker.engine.onnx.model import OnnxModel, model_key
from tokenbus.worker.engine.onnx.runner import OnnxRunner
from tokenbus.worker.engine.process.loaded_models import LoadedModels
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import Runner


def load(settings: EngineSettings, progress: Callable[[float], None], models: LoadedModels[OnnxModel]) -> Runner:
    """Returns a runner over a model that replicas share. `progress` gets the share that is loaded, from 0 to 1.

    Raises ModelError if the files can't be served, or for settings that the model or the machine can't meet."""
    settings_resolution.validate(settings)
    device = devices.choose(settings)
    layout = OnnxLayout(on_gpu=device.kind != "cpu")
    files = ModelFiles.from_paths(settings.files) or layout.find(settings.model, progress)
    model = models.acquire(model_key(files, settings, device), lambda: OnnxModel(files, settings, device))
    try:
        make = EncoderRunner if model.graph.logits is None else OnnxRunner
        return make(model, settings, lambda: models.release(model))
    except BaseException:
        models.release(model)
        raise
