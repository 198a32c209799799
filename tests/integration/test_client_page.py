"""Every example of docs/client.md prints what the page shows, and leaves nothing running."""

import ast
import asyncio
import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_client import until_idle
from tests.support.raw_client import RawClient

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
_BLOCK = re.compile(r"```(\w*)\n(.*?)```\n", re.DOTALL)


SECTIONS = [section for section in PAGE.read_text().split("\n## ") if "```python" in section]


@pytest.mark.parametrize("text", SECTIONS, ids=[section.partition("\n")[0] for section in SECTIONS])
async def test_an_example_prints_what_the_page_shows(
    text: str, url: str, bare: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENBUS_NATS", url)
    blocks = _BLOCK.findall(text)
    names: dict[str, Any] = {}
    for (language, code), (after, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "python":
            printed = await run_cell(code, names)
            assert printed.rstrip("\n") == (shown.rstrip("\n") if not after else "")
    names.clear()  # ends the streams that a variable holds
    await until_idle(bare, timeout_s=3)


async def run_cell(code: str, names: dict[str, Any]) -> str:
    """Runs code as a notebook does, and returns what it prints."""
    compiled = compile(code, PAGE.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if compiled.co_flags & inspect.CO_COROUTINE:
            async with asyncio.timeout(30):
                await eval(compiled, names)
        else:
            await asyncio.to_thread(exec, compiled, names)
    return printed.getvalue()
