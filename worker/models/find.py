"""Finds a model on this machine or on the Hub, and determines its kind."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenbus.worker.files.model_files import Layout, ModelFiles, is_hub_name
from tokenbus.worker.models import transfer_log


def find(model: str, layouts: Sequence[Layout], progress: Callable[[float], None]) -> ModelFiles:
    """Finds a model by the first layout that recognises it, downloading it from the Hub if necessary.

    `progress` is called with the share downloaded. Raises ModelError, saying what to do, if there is no such model or
    it can't be fetched."""
    if is_hub_name(model):
        from tokenbus.worker.hub import fetch  # slow to import, and local models don't need it

        return fetch.fetch(model, layouts, transfer_log.LoggedTransfer(model, progress))
    path = Path(model)
    return next((layout for layout in layouts if layout.recognises(path)), layouts[0]).find(path)
