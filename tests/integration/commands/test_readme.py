"""The snippets of the README and of the page about clients work unchanged against a running system."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_client import until_idle
from tests.support.raw_client import RawClient

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
CLIENTS = (ROOT / "docs" / "clients.md").read_text()
RIGHT = "The capital of Avaria is Limora."
HTTP = "http://127.0.0.1:8000/v1"
TRANSPORT = "@nats-io/transport-node@3.4.0"


def snippets(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


(OPENAI, LIBRARY) = snippets("python")
(BARE,) = snippets("python", CLIENTS)


def run(command: list[str], folder: Path, url: str) -> str:
    environment = os.environ | {"TOKENBUS_NATS": url, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("snippet", [BARE, LIBRARY], ids=["bare nats-py", "client library"])
def test_a_python_snippet_streams_an_answer(url: str, tmp_path: Path, snippet: str) -> None:
    (tmp_path / "snippet.py").write_text(snippet)
    output = run([sys.executable, "-W", "ignore", "snippet.py"], tmp_path, url)
    answer, end = output.strip().splitlines()
    assert answer == RIGHT
    assert end.startswith("stop")
    assert re.search(r"completion_tokens\W+13", end)


def test_a_tool_is_called_and_its_result_answered_as_the_page_about_tools_shows(url: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tools.md").read_text()
    snippet, shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    (tmp_path / "snippet.py").write_text(snippet)
    assert run([sys.executable, "-W", "ignore", "snippet.py"], tmp_path, url) == shown


def test_the_openai_snippet_streams_an_answer(said_by_up: dict[str, Any], tmp_path: Path) -> None:
    assert HTTP in OPENAI
    (tmp_path / "snippet.py").write_text(OPENAI.replace(HTTP, said_by_up["http"]))
    assert run([sys.executable, "-W", "ignore", "snippet.py"], tmp_path, said_by_up["nats"]) == f"{RIGHT}\nstop\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_snippet_gets_an_answer(said_by_up: dict[str, Any], tmp_path: Path) -> None:
    (snippet,) = [one for one in snippets("sh") if one.startswith("curl ")]
    answer = json.loads(run(["sh", "-c", snippet.replace(HTTP, said_by_up["http"])], tmp_path, said_by_up["nats"]))
    assert answer["choices"][0]["message"]["content"] == RIGHT


@pytest.fixture(scope="session")
def node_folder() -> Path:
    """A folder with the npm package that the page about clients names, kept between runs."""
    cache = Path(os.environ.get("TOKENBUS_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "tokenbus" / "node"
    if not (folder / "node_modules" / "@nats-io" / "transport-node").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        npm = ["npm", "install", "--no-audit", "--no-fund", TRANSPORT]
        subprocess.run(npm, cwd=folder, check=True, capture_output=True, timeout=120)
    return folder


def run_javascript(snippet: str, folder: Path, url: str) -> str:
    path = folder / f"snippet-{os.getpid()}.mjs"
    path.write_text(snippet)
    try:
        return run(["node", path.name], folder, url)
    finally:
        path.unlink()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_javascript_snippet_streams_an_answer(url: str, node_folder: Path) -> None:
    output = run_javascript(snippets("js", CLIENTS)[0], node_folder, url)
    answer, end = output.strip().splitlines()
    assert answer == RIGHT
    assert '"completion_tokens":13' in end
    assert end.startswith("stop")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
async def test_the_javascript_generator_cancels_times_out_and_throws_as_shown(
    url: str, bare: RawClient, node_folder: Path
) -> None:
    page = CLIENTS[CLIENTS.rindex("```js") :]
    snippet, shown = re.search(r"```js\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    assert await asyncio.to_thread(run_javascript, snippet, node_folder, url) == shown
    await until_idle(bare, timeout_s=1)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("question", re.findall(r'bin/tokenbus generate --model demo "([^"]+)"', README))
def test_the_first_commands_of_the_readme_work(url: str, tmp_path: Path, question: str) -> None:
    command = [sys.executable, "-m", "tokenbus.cli.start", "generate", "--model", "demo", question]
    output = run(command, tmp_path, url)
    assert output.strip()


@pytest.mark.parametrize("page", ["README.md", "docs/README.md", "docs/clients.md", "docs/client.md"])
def test_every_file_that_a_page_links_to_is_there(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text())
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_index_of_the_pages_has_every_page() -> None:
    folder = ROOT / "docs"
    index = (folder / "README.md").read_text()
    unlisted = [page.name for page in folder.glob("*.md") if f"({page.name})" not in index]
    assert unlisted == ["README.md"]
