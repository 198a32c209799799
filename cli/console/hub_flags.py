"""The flag for the folder of models from the Hub, for all commands that use any."""

import argparse

from tokenbus.cli.console import arguments
from tokenbus.cli.console.flags import Flag
from tokenbus.worker.models import folders

HUB_CACHE = Flag(
    *("--hub-cache --download-dir", arguments.DIR, "folder for models from the Hugging Face Hub", ""),
    unset="HF_HUB_CACHE, else hub in HF_HOME",
    variable=folders.HUB_CACHE_VARIABLE,
)


def apply(options: argparse.Namespace) -> str:
    """Sets the folder for models to the flag's; returns the reason if that is impossible."""
    try:
        folders.use_hub_cache(options.hub_cache)
    except ValueError as error:
        return str(error)
    return ""
