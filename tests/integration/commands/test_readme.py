"""The README's snippets work unchanged against a running system."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
RIGHT = "The capital of Avaria is Limora."
HTTP = "http://127.0.0.1:8000/v1"
TRANSPORT = "@nats-io/transport-node@3.4.0"


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(command: list[str], folder: Path, url: str) -> str:
    environment = os.environ | {"TOKENBUS_NATS": url, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(2), ids=["bare nats-py", "client library"])
def test_a_python_snippet_streams_an_answer(url: str, tmp_path: Path, number: int) -> None:
    (tmp_path / "snippet.py").write_text(snippets("python")[number])
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
    snippet = snippets("python")[2]
    assert HTTP in snippet
    (tmp_path / "snippet.py").write_text(snippet.replace(HTTP, said_by_up["http"]))
    assert run([sys.executable, "-W", "ignore", "snippet.py"], tmp_path, said_by_up["nats"]) == f"{RIGHT}\nstop\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_snippet_gets_an_answer(said_by_up: dict[str, Any], tmp_path: Path) -> None:
    (snippet,) = [one for one in snippets("sh") if one.startswith("curl ")]
    answer = json.loads(run(["sh", "-c", snippet.replace(HTTP, said_by_up["http"])], tmp_path, said_by_up["nats"]))
    assert answer["choices"][0]["message"]["content"] == RIGHT


@pytest.fixture(scope="session")
def node_folder() -> Path:
    """A folder with the npm package that the README names, kept between runs."""
    cache = Path(os.environ.get("TOKENBUS_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "tokenbus" / "node"
    if not (folder / "node_modules" / "@nats-io" / "transport-node").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        npm = ["npm", "install", "--no-audit", "--no-fund", TRANSPORT]
        subprocess.run(npm, cwd=folder, check=True, capture_output=True, timeout=120)
    return folder


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_javascript_snippet_streams_an_answer(url: str, node_folder: Path) -> None:
    (snippet,) = snippets("js")
    path = node_folder / f"snippet-{os.getpid()}.mjs"
    path.write_text(snippet)
    try:
        output = run(["node", path.name], node_folder, url)
    finally:
        path.unlink()
    answer, end = output.strip().splitlines()
    assert answer == RIGHT
    assert '"completion_tokens":13' in end
    assert end.startswith("stop")


@pytest.mark.parametrize("question", re.findall(r'generate --model demo "([^"]+)"', README))
def test_the_first_commands_of_the_readme_work(url: str, tmp_path: Path, question: str) -> None:
    command = [sys.executable, "-m", "tokenbus.cli.start", "generate", "--model", "demo", question]
    output = run(command, tmp_path, url)
    assert output.strip()


def test_every_file_that_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
