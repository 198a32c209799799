"""The location of models from the Hub: a folder named by the user takes precedence over the Hub library's variables.

The library reads its variables on import, so call `use` first. Child processes inherit them."""

import os
from pathlib import Path

VARIABLE = "TOKENBUS_HUB_CACHE"
_HUB_VARIABLE = "HF_HUB_CACHE"


def use(named: str) -> None:
    """Keeps models in a folder from now on, which is created with the first model. If empty, HF_HUB_CACHE, HF_HOME and
    XDG_CACHE_HOME apply.

    Raises ValueError if nothing can be kept there."""
    if not named:
        return
    path = Path(named).expanduser().absolute()
    existing = next(one for one in (path, *path.parents) if one.exists())
    if not existing.is_dir():
        raise ValueError(f"--hub-cache {named}: {existing} is not a directory")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"--hub-cache {named}: this user may not write to {existing}: name another folder")
    os.environ[VARIABLE] = os.environ[_HUB_VARIABLE] = str(path)


def folder() -> Path:
    """Returns the folder of the Hub's cache."""
    from huggingface_hub import constants  # slow to import

    return Path(constants.HF_HUB_CACHE)
