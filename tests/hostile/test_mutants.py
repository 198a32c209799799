"""Models with a mistake in one of their files are loaded beside running streams, and stop none of them.

TOKENBUS_MUTANTS_OF names a GGUF of which mutants are made; without it they are the demo model's. TOKENBUS_MUTANTS says
how many, and TOKENBUS_MUTANTS_SEED which."""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
SEED = int(os.environ.get("TOKENBUS_MUTANTS_SEED", "1"))
MODEL = Path(os.environ.get("TOKENBUS_MUTANTS_OF", demo.MODEL_PATH))
WEIGHTS = MODEL.read_bytes()[header_bytes(MODEL) :]
SETTINGS = {"context_length": 512, "flash_attention": "auto", "cache_type_k": "f16", "cache_type_v": "f16"}
"""Those of an ONNX model too, unlike the ones with which the neighbours are exact."""
Mutant = tuple[str, Path]
TALE = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
QUESTION = {"prompt": "The fox asked the owl about 12 + 30. " * 8, "max_tokens": 24, "ignore_eos": True}


class Neighbour:
    """Streams of a model, one after another, and the longest time between two of their messages."""

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.gap_s = 0.0

    async def run(self, bare: RawClient) -> None:
        while True:
            answer = await bare.generate(TALE)
            await answer.until(1)
            while not answer.terminals:
                began = time.monotonic()
                await answer.until(len(answer.messages) + 1)
                self.gap_s = max(self.gap_s, time.monotonic() - began)
            (terminal,) = answer.terminals
            assert terminal["finish_reason"] == "length", terminal
            assert terminal["attempt"] == 1, terminal
            self.texts.add(answer.text)


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
    neighbours = [Neighbour() for _ in range(STREAMS)]

    async def load_some() -> None:
        for number, (mistake, path) in made:
            try:
                await load(bare, card, path, outcomes)
            except Exception as error:
                raise AssertionError(f"mutant {number} of seed {SEED}: {mistake}") from error

    running = [asyncio.create_task(one.run(bare)) for one in neighbours]
    try:
        await asyncio.gather(*(load_some() for _ in range(LOADERS)))
        for task in running:
            assert not task.done() or task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        counts = ", ".join(f"{outcomes.count(one)} {one}" for one in sorted(set(outcomes)))
        gap_s = max(one.gap_s for one in neighbours)
        with capsys.disabled():
            print(f"\n{kind}: {counts}; the longest gap of {STREAMS} streams: {gap_s:.2f} s")
    assert len(outcomes) == count
    assert not system.logged("worker", "engine_died")
    (after,) = [one for one in await until_ready(bare, 1) if one["model"] == "demo"]
    assert after["pids"]["engine"] == card["pids"]["engine"]
    assert len(set().union(*(one.texts for one in neighbours))) <= 1
