"""The flag that says where models from the Hub are kept, for all commands that use any."""

import argparse
import os

from tokenbus.worker.hub import location


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hub-cache",
        default=os.environ.get(location.VARIABLE, ""),
        metavar="DIR",
        help="folder for models from the Hugging Face Hub (HF_HUB_CACHE, else hub in HF_HOME)",
    )


def apply(options: argparse.Namespace) -> str:
    """Keeps models where the flag says; returns why that is impossible, if it is."""
    try:
        location.use(options.hub_cache)
    except ValueError as error:
        return str(error)
    return ""
