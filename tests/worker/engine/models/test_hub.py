"""A model is downloaded by its name on the Hub, here from a server that speaks enough of the Hub's protocol."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMIT = "a" * 40
FILES = {
    "org/tiny-GGUF": {
        "tiny-Q4_K_M.gguf": b"four" * 50_000,
        "tiny-Q8_0-00001-of-00002.gguf": b"eight one",
        "tiny-Q8_0-00002-of-00002.gguf": b"eight two",
        "README.md": b"read me",
    },
    "org/tiny": {"generation_config.json": b'{"temperature": 0.5}', "config.json": b"{}", "model.safetensors": b"no"},
    "org/empty": {"README.md": b"nothing here"},
}
CARDS: dict[str, dict[str, object]] = {"org/tiny-GGUF": {"base_model": "org/tiny"}}


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            self._info("/".join(path.split("/")[2:4]), with_body=with_body)
            return
        repo, _, name = path.partition("/resolve/main/")
        body = FILES.get(repo, {}).get(name)
        if body is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound" if repo in FILES else "RepoNotFound"}, with_body)
            return
        tag = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._send(200, body, tag, with_body)

    def _info(self, repo: str, *, with_body: bool) -> None:
        if repo not in FILES:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
            return
        siblings = [{"rfilename": name} for name in FILES[repo]]
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "cardData": CARDS.get(repo, {})}
        self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


SCRIPT = """
import json, sys
from tokenbus.worker.engine.models import registry
from tokenbus.worker.engine.runner import ModelError
shares = []
try:
    found = registry.find(sys.argv[1], shares.append)
except ModelError as error:
    print(json.dumps({"error": str(error)}))
else:
    sidecars = {name: path.read_text() for name, path in found.sidecars.items()}
    print(json.dumps({"weights": str(found.weights), "sidecars": sidecars, "shares": shares}))
"""


def find(model: str, url: str, cache: Path, **variables: str) -> dict[str, object]:
    """Finds a model in a process of its own, because the Hub's library reads its variables only once."""
    own = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model],
        env=os.environ | own | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_repository_is_fetched_with_what_its_base_says_and_found_again_offline(url: str, tmp_path: Path) -> None:
    first = find("org/tiny-GGUF", url, tmp_path)
    path = Path(str(first["weights"]))
    assert path.name == "tiny-Q4_K_M.gguf"
    assert path.read_bytes() == FILES["org/tiny-GGUF"]["tiny-Q4_K_M.gguf"]
    assert first["sidecars"] == {"generation_config.json": '{"temperature": 0.5}', "config.json": "{}"}
    shares = first["shares"]
    assert isinstance(shares, list)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    again = find("org/tiny-GGUF", url, tmp_path, HF_HUB_OFFLINE="1")
    assert (again["weights"], again["sidecars"]) == (first["weights"], first["sidecars"])


def test_all_parts_of_the_quantization_that_was_asked_for_are_fetched(url: str, tmp_path: Path) -> None:
    path = Path(str(find("org/tiny-GGUF:q8_0", url, tmp_path)["weights"]))
    assert path.name == "tiny-Q8_0-00001-of-00002.gguf"
    assert (path.parent / "tiny-Q8_0-00002-of-00002.gguf").read_bytes() == b"eight two"


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("org/tiny-GGUF:Q2_K", "there is no Q2_K, only Q4_K_M, Q8_0"),
        ("org/empty", "there is no GGUF file"),
        ("org/nothing", "there is no such repository on the Hub"),
    ],
)
def test_what_is_not_there_is_refused_saying_what_is(url: str, tmp_path: Path, model: str, problem: str) -> None:
    assert problem in str(find(model, url, tmp_path)["error"])


def test_without_hub_and_cache_it_says_so(tmp_path: Path) -> None:
    answer = find("org/tiny-GGUF", "http://127.0.0.1:9", tmp_path)
    assert "the Hub can't be reached, and nothing of it is in the cache" in str(answer["error"])
