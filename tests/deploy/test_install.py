"""`make up` says what a machine lacks before it downloads anything, and is never silent while it works."""

import fcntl
import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy import install, llama_cpp_wheel, progress, requirements


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, on a machine with an empty cache and no compilers chosen by variables."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("TOKENBUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_a_compiler_one_line_names_the_package(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "_families", lambda: iter(["alpine"]))
    with pytest.raises(requirements.LackError, match=r"needs a C\+\+ compiler; there is none: apk add g\+\+$"):
        llama_cpp_wheel.check("1.2.3")


def test_a_compiler_that_can_not_compile_is_none(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(empty_path / "c++", "exit 1")
    with pytest.raises(requirements.LackError, match=r"c\+\+ can't compile a small program: "):
        llama_cpp_wheel.check("1.2.3")
    monkeypatch.setenv("CXX", "ours --fast")
    with pytest.raises(requirements.LackError, match="ours --fast can't be run"):
        llama_cpp_wheel.check("1.2.3")


def test_where_the_wheel_is_cached_no_compiler_is_needed(empty_path: Path) -> None:
    folder = llama_cpp_wheel.cache_folder("1.2.3")
    folder.mkdir(parents=True)
    (folder / "llama.whl").touch()
    llama_cpp_wheel.check("1.2.3")


def test_of_two_builds_at_once_the_second_takes_what_the_first_has_compiled(
    empty_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = llama_cpp_wheel.cache_folder("1.2.3")
    folder.mkdir(parents=True)
    lock = folder.with_name(f".{folder.name}.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(llama_cpp_wheel.build, "1.2.3")
        said = ""
        while "another process is compiling it" not in said:
            assert not second.done()
            said += capfd.readouterr().err
        (folder / "llama.whl").touch()
        lock.close()
        second.result()


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ('ID=ubuntu\nID_LIKE="debian"\n', "apt install g++"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf install gcc-c++"),
        ("ID=alpine\n", "apk add g++"),
        (
            "ID=other\n",
            "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), apk add g++ (Alpine), "
            "xcode-select --install (macOS)",
        ),
    ],
)
def test_the_package_is_named_as_this_system_calls_it(monkeypatch: pytest.MonkeyPatch, release: str, says: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: release)
    assert requirements.hint("compiler") == says


def test_a_disk_that_is_too_full_is_named(tmp_path: Path) -> None:
    with pytest.raises(requirements.LackError, match=r"it takes 1,000,000,000,000 MB in .*, where [\d,]+ MB are free"):
        requirements.check_space(tmp_path / "not" / "there", 10**12, "it")
    requirements.check_space(tmp_path / "not" / "there", 0, "it")


def test_an_nvidia_gpu_is_one_that_the_driver_lists(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.platform, "machine", lambda: "x86_64")
    assert install.has_nvidia_gpu() == Path("/dev/nvidia0").exists()
    program(empty_path / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'")
    assert install.has_nvidia_gpu()
    program(empty_path / "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert install.has_nvidia_gpu() == Path("/dev/nvidia0").exists()
    monkeypatch.setattr(install.platform, "machine", lambda: "aarch64")
    program(empty_path / "nvidia-smi", "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'")
    assert not install.has_nvidia_gpu()


class Screen(io.StringIO):
    """Standard error that opens a FIFO when it is told of a download."""

    def __init__(self, fifo: Path) -> None:
        super().__init__()
        self._fifo = fifo

    def write(self, text: str) -> int:
        if "downloading" in text and self._fifo.exists():
            self._fifo.write_text("seen")
            self._fifo.unlink()
        return super().write(text)


def test_the_news_of_a_command_are_shown_while_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    screen = Screen(tmp_path / "fifo")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "IN_LOG_S", 0.0)
    code = f"print('Downloading a.whl (3 MB)', flush=True); open({str(tmp_path / 'fifo')!r}).read()"
    progress.run([sys.executable, "-c", code], "beginning", install._describe)
    lines = screen.getvalue().splitlines()
    assert lines[0].endswith("  beginning")
    assert lines[-1].endswith("  downloading a.whl (3 MB)")


def test_a_command_that_fails_shows_the_end_of_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    code = "print('ERROR: no such package'); raise SystemExit(3)"
    with pytest.raises(progress.CommandFailedError, match="ended with status 3") as failed:
        progress.run([sys.executable, "-c", code], "trying", install._describe)
    assert failed.value.output == "ERROR: no such package"
    assert "ERROR: no such package" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "news"),
    [
        (
            "  Downloading https://x.org/simple/numpy-2.4.6-cp311.whl (16.9 MB)",
            "downloading numpy-2.4.6-cp311.whl (16.9 MB)",
        ),
        ("  Using cached rich-15.0.0-py3-none-any.whl (310 kB)", "downloading rich-15.0.0-py3-none-any.whl (310 kB)"),
        ("Installing collected packages: a, b, c", "installing 3 packages"),
        ("WARNING: something", ""),
    ],
)
def test_the_lines_of_pip_that_say_how_far_it_is_are_understood(line: str, news: str) -> None:
    assert install._describe(line) == news


@pytest.mark.parametrize(
    ("line", "news"),
    [("  [12/83] Building CXX object ggml.cpp.o", "compiling: 12/83"), ("[ 12%] Building CXX", "compiling: 12%")],
)
def test_the_lines_of_a_compilation_are_understood(line: str, news: str) -> None:
    assert llama_cpp_wheel._describe(line) == news
