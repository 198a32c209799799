"""The command line of a benchmark."""

import argparse
import shlex
from pathlib import Path


def parser(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Returns a parser that shows the module's docstring, with a flag for each number, which is its default."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return made


def model_parser(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Returns a parser that also has `--model`, the file for `benchmark_model`."""
    made = parser(doc, **numbers)
    made.add_argument("--model", type=Path, help="a GGUF file; without it, one with random weights is made")
    return made


def server_parser(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Returns a parser that also has `--model`, and `--server`, further flags of llama-server in one argument."""
    made = model_parser(doc, **numbers)
    made.add_argument("--server", type=shlex.split, default=[], metavar="FLAGS", help="llama-server's further flags")
    return made
