"""Tries tiny models of all architectures, and writes what it finds into docs/models.md.

    python -m tests.architectures             all of them
    python -m tests.architectures gemma3 t5   some; the lines of others stay

Each is tried in a process of its own, since llama.cpp may end it. All take about 6 minutes on 2 cores."""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.architectures import table
from tests.architectures.finding import Finding
from tests.architectures.names import NAMES
from tests.architectures.trial import try_out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", allow_abbrev=False)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time (%(default)s)")
    options = parser.parse_args()
    names = options.architectures or NAMES
    findings: dict[str, Finding] = {}
    with ThreadPoolExecutor(options.jobs) as executor:
        for name, finding in zip(names, executor.map(try_out, names), strict=True):
            findings[name] = finding
            sys.stdout.write(table.row(name, finding) + "\n")
            sys.stdout.flush()
    table.write(findings)


if __name__ == "__main__":
    main()
