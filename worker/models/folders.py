"""The folders in which models are kept: the Hub's cache, and ours beside or in it."""

import os
from pathlib import Path

HUB_CACHE_VARIABLE = "TOKENBUS_HUB_CACHE"
_HUB_VARIABLE = "HF_HUB_CACHE"


def use_hub_cache(named: str) -> None:
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
    os.environ[HUB_CACHE_VARIABLE] = os.environ[_HUB_VARIABLE] = str(path)


def hub_folder() -> Path:
    """Returns the folder of the Hub's cache."""
    from huggingface_hub import constants  # slow to import

    return Path(constants.HF_HUB_CACHE)


def packaged() -> Path:
    """Returns the absolute path of the folder of models from Python packages: in the folder named by the user for the
    Hub's models, else in that of all caches."""
    named = (os.environ.get(name) for name in (HUB_CACHE_VARIABLE, "TOKENBUS_CACHE", "XDG_CACHE_HOME"))
    cache = next(filter(None, named), "~/.cache")
    return Path(os.path.abspath(os.path.expanduser(cache)), "tokenbus", "models")
