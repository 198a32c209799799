"""Compares the memory that a block takes in a router's index with the `RadixTree` of NVIDIA Dynamo's wheel.

Run: .venv/bin/python -m bench.router.index_memory [--blocks 260000 360000] [--times 3]

Each index is filled in a fresh process with the events of bench/router/ingest.py, which arrive one by one over a pipe.
The growth of the resident memory is divided by the number of blocks. A Python dictionary doubles its table when it is
full, so our index takes most just after it has grown, at about 350,000 blocks, twice that, and so on."""

import argparse
import gc
import os
import statistics
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from bench import flags
from bench.baselines import dynamo_wheel
from bench.router import ingest

_FRAME = struct.Struct("<II")
_WORKERS = 64


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def make(name: str, num_blocks: int) -> ingest.Side:
    """Returns an empty index."""
    if name == "ours":
        return ingest.TokenbusSide(_WORKERS, 4 * num_blocks // _WORKERS)
    return ingest.DynamoSide(dynamo_wheel.find())


def frames(source: BinaryIO) -> Iterator[ingest.Payload]:
    while head := source.read(_FRAME.size):
        worker, length = _FRAME.unpack(head)
        yield worker, source.read(length)


def fill(name: str, num_blocks: int) -> None:
    """Fills an index, in a process of its own, from standard input, and prints by how many bytes it has grown."""
    way = make(name, num_blocks)
    coming = frames(sys.stdin.buffer)
    way.take([next(coming)])
    gc.collect()
    before = resident_bytes()
    way.take(coming)
    gc.collect()
    print(resident_bytes() - before)


def growth(name: str, num_blocks: int, payloads: Sequence[ingest.Payload]) -> int:
    """Returns by how many bytes a fresh process grows when it applies all of the payloads."""
    command = [sys.executable, "-m", "bench.router.index_memory", "--fill", name, "--blocks", str(num_blocks)]
    given = b"".join(_FRAME.pack(worker, len(payload)) + payload for worker, payload in payloads)
    return int(subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    parser = flags.parser(__doc__, times=3)
    parser.add_argument("--blocks", type=int, nargs="+", default=[260_000, 360_000])
    parser.add_argument("--fill", choices=["ours", "dynamo"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill:
        return fill(options.fill, options.blocks[0])
    dynamo_wheel.find()
    print(f"{'bytes a block':>16}{'ours':>24}{'Dynamo':>24}")
    for num_blocks in options.blocks:
        held = ingest.runs(_WORKERS, num_blocks, 16)
        count = sum(len(run.hashes) for run in held)
        cells = []
        for name in ("ours", "dynamo"):
            payloads = make(name, num_blocks).encode([ingest.Change(run) for run in held])
            found = sorted(growth(name, num_blocks, payloads) / count for _ in range(options.times))
            cells.append(f"{statistics.median(found):.0f} ({found[0]:.0f} to {found[-1]:.0f})")
        print(f"{count:>16,}{cells[0]:>24}{cells[1]:>24}")
    return None


if __name__ == "__main__":
    main()
