"""A model is downloaded by its name on the Hub, here from a server that speaks its protocol."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from tests.support import hub_server
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.models import fetch, registry
from tokenbus.worker.models.hub import RemoteFile, Repository

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


@pytest.fixture
def url() -> Iterator[str]:
    hub = hub_server.HubServer(FILES)
    hub.cards["org/tiny-GGUF"] = {"base_model": "org/tiny"}
    with hub_server.running(hub):
        yield hub.url


SCRIPT = """
import json, sys
from tokenbus.worker.models import registry
from tokenbus.worker.contract.engine_errors import ModelError
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
        ("org/tiny-GGUF:Q2_K", "there is no Q2_K, only Q4_K_M (200.00 kB), Q8_0 (18 B)"),
        ("org/empty", "there is no GGUF file"),
        ("org/nothing", "there is no such repository on the Hub"),
    ],
)
def test_what_is_not_there_is_refused_saying_what_is(url: str, tmp_path: Path, model: str, problem: str) -> None:
    assert problem in str(find(model, url, tmp_path)["error"])


def test_without_hub_and_cache_it_says_so(tmp_path: Path) -> None:
    answer = find("org/tiny-GGUF", "http://127.0.0.1:9", tmp_path)
    assert "the Hub can't be reached, and nothing of it is in the cache" in str(answer["error"])
    assert str(answer["error"]).endswith("; check the network, HF_ENDPOINT and HF_HUB_OFFLINE")


@pytest.mark.parametrize("file", [RemoteFile(1 << 40, "a" * 64), RemoteFile(10, "")], ids=["large", "no digest"])
def test_what_the_library_downloads_is_reported_meanwhile(
    file: RemoteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = threading.Event()

    def silent(name: str, path: str) -> str:
        assert reported.wait(20)
        return str(tmp_path / path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", silent)
    monkeypatch.setattr(fetch, "_REPORT_S", 0.001)
    found = fetch.download("org/tiny", "tiny.gguf", file, lambda size: reported.set() if size == 0 else None)
    assert found == tmp_path / "tiny.gguf"


def test_a_download_by_the_library_is_waited_for_no_longer_than_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()

    def stop(size: int) -> None:
        raise ModelError("the worker stops")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, path: str(given_up.wait(20)))
    monkeypatch.setattr(fetch, "_REPORT_S", 0.001)
    with pytest.raises(ModelError, match="the worker stops"):
        fetch.download("org/tiny", "tiny.gguf", RemoteFile(1 << 40, "a" * 64), stop)
    given_up.set()


def test_small_files_are_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"tiny.gguf": 5, "config.json": 2}
    here = Repository("org/tiny", {name: RemoteFile(size, "a" * 64) for name, size in sizes.items()}, None)
    monkeypatch.setattr(fetch.hub, "look_up", lambda name: here)
    monkeypatch.setattr(fetch, "_check_space", lambda found, parts: None)
    asked: list[str] = []

    def download(name: str, path: str, file: RemoteFile, on_size: fetch.OnSize) -> Path:
        asked.append(path)
        on_size(1)
        return Path(path)

    monkeypatch.setattr(fetch, "download", download)
    reports: list[tuple[str, int, int]] = []
    fetch.fetch("org/tiny", registry.layouts("gguf"), lambda done, total: reports.append((asked[-1], done, total)))
    assert reports == [("tiny.gguf", 1, 5), ("config.json", 5, 5)]
