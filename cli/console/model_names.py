"""The names of models that stand for files on this machine."""

from pathlib import Path

from tokenbus.demo import MODEL_PATH
from tokenbus.worker.files import model_files
from tokenbus.worker.models import catalog


def located(model: str) -> str:
    """Returns a model's name on the Hub, or its path. `demo` is the model that comes with Tokenbus, and a name of the
    catalog one that was fetched by `tokenbus models fetch`, unless a file or folder of that name exists."""
    if model_files.is_hub_name(model):
        return model
    if model == "demo" and not Path(model).exists():
        return str(MODEL_PATH)
    return str(Path(catalog.located(model)))
