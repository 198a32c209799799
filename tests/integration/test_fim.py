"""Filling in the middle, seen by a client that only follows docs/wire.md."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX
from tests.support.system import System
from tokenbus import demo

MARKS = {"<|system|>": "<|fim_prefix|>", "<|user|>": "<|fim_suffix|>", "<|assistant|>": "<|fim_middle|>"}


@pytest.fixture
async def system(tmp_path: Path) -> Any:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


def with_marks(folder: Path) -> Path:
    """Copies the demo model with the names of three of its tokens changed to those that mark a gap."""
    shutil.copytree(demo.ONNX_PATH, folder, ignore=shutil.ignore_patterns("*.jinja"))
    for path in folder.glob("*.json"):
        text = path.read_text()
        for name, mark in MARKS.items():
            text = text.replace(name, mark)
        path.write_text(text)
    return folder


async def test_a_gap_is_filled_as_the_prompt_with_its_marks_is_continued(system: System, tmp_path: Path) -> None:
    system.router("router")
    system.worker("plain")
    system.worker("fills", model=with_marks(tmp_path / "fim"), served_name="fim")
    bare = await system.connect()
    await until_ready(bare, 2)
    vocabulary = json.loads((tmp_path / "fim/tokenizer.json").read_text())["model"]["vocab"]
    before, behind, gap = (vocabulary[mark] for mark in MARKS.values())

    async def ids_of(text: str, **fields: bool) -> list[int]:
        payload = json.dumps({"prompt": text, **fields}).encode()
        reply = await bare.nats.request(f"{PREFIX}.tokenize.fim", payload, timeout=60)
        found: list[int] = json.loads(reply.data)["token_ids"]
        return found

    bos = await ids_of("")
    first, last = [await ids_of(text, add_special_tokens=False) for text in ("12 + ", " = 42")]
    greedy = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    fim = f"{PREFIX}.generate.fim"
    filled = await bare.ask({"prompt": "12 + ", "suffix": " = 42", **greedy}, subject=fim)
    marked = await bare.ask({"token_ids": [*bos, before, *first, behind, *last, gap], **greedy}, subject=fim)
    assert filled.text == marked.text
    assert filled.terminals[0]["usage"]["prompt_tokens"] == marked.terminals[0]["usage"]["prompt_tokens"]
    assert filled.text != (await bare.ask({"prompt": "12 + ", **greedy}, subject=fim)).text
    refused = (await bare.ask({"prompt": "12 + ", "suffix": " = 42"})).terminals[0]["error"]
    assert (refused["code"], refused["param"]) == ("unsupported", "suffix")
