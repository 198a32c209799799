"""Models with a mistake in one of their files are loaded beside running streams, and stop none of them.

TOKENBUS_MUTANTS_OF names a GGUF of which mutants are made; without it they are the demo model's. TOKENBUS_MUTANTS says
how many, and TOKENBUS_MUTANTS_SEED which. Between two rounds nothing is loaded until some streams have ended: gaps of
that time are what everything else on this machine costs. Told apart, too, are times in which this process, which reads
the streams, did not get to run."""

import asyncio
import itertools
import os
import shutil
import time
from collections.abc import Awaitable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.test_replicas import control
from tests.hostile import scale
from tests.support import safetensors_model
from tests.support.engines import exact_demo
from tests.support.exact_client import until_ready
from tests.support.folder_mutants import mutants as of_folder
from tests.support.gguf_mutants import header_bytes
from tests.support.gguf_mutants import mutants as of_header
from tests.support.raw_client import PREFIX, RawClient
from tests.support.system import System
from tokenbus import demo

STREAMS = 6
LOADERS = 2
ROUND = 25
LONG_S = 0.05
"""Gaps and stalls that are shorter are not looked at."""
SEED = int(os.environ.get("TOKENBUS_MUTANTS_SEED", "1"))
MODEL = Path(os.environ.get("TOKENBUS_MUTANTS_OF", demo.MODEL_PATH))
WEIGHTS = MODEL.read_bytes()[header_bytes(MODEL) :]
SETTINGS = {"context_length": 512, "flash_attention": "auto", "cache_type_k": "f16", "cache_type_v": "f16"}
"""Those of an ONNX model too, unlike the ones with which the neighbours are exact."""
Mutant = tuple[str, Path]
TALE = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
QUESTION = {"prompt": "The fox asked the owl about 12 + 30. " * 8, "max_tokens": 24, "ignore_eos": True}


class Span(NamedTuple):
    begin_s: float
    end_s: float

    def without(self, others: Iterable["Span"]) -> float:
        """Returns its length without what it shares with others, which do not overlap."""
        shared = sum(max(0.0, min(self.end_s, one.end_s) - max(self.begin_s, one.begin_s)) for one in others)
        return self.end_s - self.begin_s - shared


class Neighbours:
    """Streams of a model, some at a time and one after another, and how long they paused."""

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.num_ended = 0
        self.is_beside_loads = False
        self._gaps: dict[bool, list[Span]] = {True: [], False: []}
        """Long times between two messages of a stream, beside loads and without them."""
        self._stalls: list[Span] = []
        """Times in which this process did not get to run."""

    async def run(self, bare: RawClient) -> None:
        while True:
            answer = await bare.generate(TALE)
            await answer.until(1)
            while not answer.terminals:
                gap = await _timed(answer.until(len(answer.messages) + 1))
                if gap.without(()) >= LONG_S:
                    self._gaps[self.is_beside_loads].append(gap)
            (terminal,) = answer.terminals
            assert terminal["finish_reason"] == "length", terminal
            assert terminal["attempt"] == 1, terminal
            self.texts.add(answer.text)
            self.num_ended += 1

    async def watch(self) -> None:
        """Records when this process stands still."""
        while True:
            turn = await _timed(asyncio.sleep(LONG_S / 5))
            if turn.without(()) >= LONG_S / 2:
                self._stalls.append(turn)

    async def rest(self) -> None:
        """Returns when as many streams have ended as run at a time."""
        until = self.num_ended + STREAMS
        self.is_beside_loads = False
        while self.num_ended < until:
            await asyncio.sleep(LONG_S)
        self.is_beside_loads = True

    def longest_gaps(self) -> str:
        return "; ".join(
            f"{where} {max((gap.without(()) for gap in gaps), default=0.0):.2f} s, "
            f"{max((gap.without(self._stalls) for gap in gaps), default=0.0):.2f} s without this process's own"
            for where, gaps in (("beside loads", self._gaps[True]), ("between", self._gaps[False]))
        )


async def _timed(waiting: Awaitable[object]) -> Span:
    began = time.monotonic()
    await waiting
    return Span(began, time.monotonic())


async def load(bare: RawClient, card: dict[str, Any], path: Path, outcomes: list[str]) -> None:
    """Loads a model, asks it something, and unloads it."""
    name = path.stem
    told = await control(bare, card, op="load", model=str(path), served_name=name, settings=SETTINGS)
    if not told[-1]["ok"]:
        assert told[-1]["error"]["code"] == "invalid_request", told
        assert told[-1]["error"]["message"]
        outcomes.append("refused")
        return
    (worker_id,) = told[-1]["worker_ids"]
    terminal = await (await bare.generate(QUESTION, subject=f"{PREFIX}.generate.{name}")).terminal()
    outcomes.append("loaded and answered" if terminal["finish_reason"] == "length" else "loaded, and gave an error")
    assert await control(bare, {"model": name, "worker_id": worker_id}, op="unload") == [{"ok": True}]


def gguf_mutants(folder: Path) -> Iterator[Mutant]:
    for number, mutant in enumerate(of_header(MODEL, SEED)):
        path = folder / f"gguf-{number}.gguf"
        path.write_bytes(mutant.data + WEIGHTS)
        yield mutant.mistake, path


def folder_mutants(original: Path, folder: Path) -> Iterator[Mutant]:
    for number, mutant in enumerate(of_folder(original, SEED)):
        path = folder / f"{original.name}-{number}"
        path.mkdir()
        for file in original.iterdir():
            if file.is_file() and file.name != mutant.name:
                os.link(file, path / file.name)
        (path / mutant.name).write_bytes(mutant.data)
        yield mutant.mistake, path


def mutants_of(kind: str, folder: Path) -> Iterator[Mutant]:
    """Writes mutants into a folder, one after another."""
    if kind == "gguf":
        return gguf_mutants(folder)
    original = folder / kind
    if kind == "safetensors":
        safetensors_model.write_demo(original)
    else:
        original.mkdir()
        for path in (*demo.ONNX_PATH.glob("*"), *demo.ONNX_PATH.glob("onnx/*")):
            if path.is_file():
                shutil.copy(path, original)
    return folder_mutants(original, folder)


@pytest.mark.parametrize("kind", ["gguf", "onnx", "safetensors"])
async def test_a_model_with_a_mistake_in_a_file_is_answered_and_stops_no_stream(
    system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    count = int(os.environ.get("TOKENBUS_MUTANTS", scale.times(3, 1_648 if kind == "gguf" else 500)))
    system.router("router")
    flags = ("--flash-attention", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
    system.worker("worker", "--max-num-seqs", str(STREAMS), *flags, model=exact_demo().model)
    bare = await system.connect()
    (card,) = await until_ready(bare, 1)
    made = zip(range(count), mutants_of(kind, tmp_path), strict=False)
    outcomes: list[str] = []
    neighbours = Neighbours()

    async def load_some(some: Iterator[tuple[int, Mutant]]) -> None:
        for number, (mistake, path) in some:
            try:
                await load(bare, card, path, outcomes)
            except Exception as error:
                raise AssertionError(f"mutant {number} of seed {SEED}: {mistake}") from error

    running = [asyncio.create_task(neighbours.run(bare)) for _ in range(STREAMS)]
    running.append(asyncio.create_task(neighbours.watch()))
    try:
        neighbours.is_beside_loads = True
        for first in range(0, count, ROUND):
            if first:
                await neighbours.rest()
            some = itertools.islice(made, ROUND)
            await asyncio.gather(*(load_some(some) for _ in range(LOADERS)))
        for task in running:
            assert not task.done() or task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        counts = ", ".join(f"{outcomes.count(one)} {one}" for one in sorted(set(outcomes)))
        with capsys.disabled():
            print(f"\n{kind}: {counts}; the longest gaps of {STREAMS} streams: {neighbours.longest_gaps()}")
    assert len(outcomes) == count
    assert not system.logged("worker", "engine_died")
    (after,) = [one for one in await until_ready(bare, 1) if one["model"] == "demo"]
    assert after["pids"]["engine"] == card["pids"]["engine"]
    assert len(neighbours.texts) <= 1
