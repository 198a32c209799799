"""The flag for the folder of models from the Hub, for all commands that use any."""

import argparse
import os

from tokenbus.worker.models import registry


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hub-cache",
        default=os.environ.get(registry.HUB_CACHE_VARIABLE, ""),
        metavar="DIR",
        help="folder for models from the Hugging Face Hub (HF_HUB_CACHE, else hub in HF_HOME)",
    )


def apply(options: argparse.Namespace) -> str:
    """Sets the folder for models to the flag's; returns the reason if that is impossible."""
    try:
        registry.use_hub_cache(options.hub_cache)
    except ValueError as error:
        return str(error)
    return ""
