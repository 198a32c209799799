"""Sets up .venv for `make up`, `make install` and `make test`: `python3 -m deploy.install [--tests]`.

Each step says what it does, its size, and afterwards the time that it took. What the machine lacks is reported before
anything is downloaded.

ONNX models get onnxruntime with CUDA if this is Linux on x86-64 with an NVIDIA GPU, which means that /dev/nvidia0
exists or `nvidia-smi -L` lists one; otherwise the one for CPUs, which takes 70 MB instead of 340."""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deploy import llama_cpp_wheel, progress, requirements

_VENV = Path(".venv")
_ROOT = Path(__file__).parents[1]
_MB = {"venv": 25, "all": 350, "cuda": 270, "tests": 320}
"""Space on disk: an empty environment, what `make up` runs, what onnxruntime with CUDA takes more, and what the tests
need in addition."""
_ONNX_RUNTIMES = {"worker-onnx": "onnxruntime", "onnx-gpu": "onnxruntime-gpu"}
_TO_DOWNLOAD = re.compile(r"\s*(?:Downloading|Using cached) (?:\S*/)?(\S+)( \([\d.]+ .?B\))?")
_TO_INSTALL = re.compile(r"Installing collected packages: (.*)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="also install what tests and checks need")
    tests: bool = parser.parse_args().tests
    os.chdir(_ROOT)
    try:
        _install(tests=tests)
    except (requirements.LackError, progress.CommandFailedError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted: the next run continues")


def _install(*, tests: bool) -> None:
    onnx = "onnx-gpu" if has_nvidia_gpu() else "worker-onnx"
    extras = ["up", "bench", "traces", onnx, *(("dev",) if tests else ())]
    size = _MB["all"] + (_MB["cuda"] if onnx == "onnx-gpu" else 0) + (_MB["tests"] if tests else 0)
    is_new = not _works(_VENV)
    requirements.check_venv()
    llama_cpp_wheel.check(llama_cpp_wheel.VERSION)
    if is_new:
        requirements.check_space(_VENV, _MB["venv"] + size, "Tokenbus with the packages that it needs")
        _step(f"Creating .venv ({_MB['venv']} MB)", _create)
    if llama_cpp_wheel.cached(llama_cpp_wheel.VERSION) is None:
        _step(
            f"Compiling llama.cpp ({llama_cpp_wheel.DOWNLOAD_MB} MB to download, once, about 3 minutes on 2 cores)",
            _compile,
        )
    wheel = llama_cpp_wheel.cached(llama_cpp_wheel.VERSION)
    assert wheel is not None
    what = "Installing Tokenbus and its packages" + (", with those of the tests" if tests else "")
    kind = "onnxruntime with CUDA for the NVIDIA GPU" if onnx == "onnx-gpu" else "onnxruntime for CPUs"
    _step(f"{what} ({size} MB on disk; {kind})", lambda: _install_packages(str(wheel), extras, onnx))


def _step(text: str, work: Callable[[], None]) -> None:
    print(text, file=sys.stderr, flush=True)
    began_at = time.monotonic()
    work()
    print(f"  done in {time.monotonic() - began_at:.1f} s", file=sys.stderr, flush=True)


def _create() -> None:
    progress.run([sys.executable, "-m", "venv", "--clear", str(_VENV)], "creating it", lambda line: "")


def _compile() -> None:
    """Compiles the wheel with the environment's pip, since this Python may have none."""
    command = [str(_VENV / "bin/python"), "-m", "deploy.llama_cpp_wheel"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            process.wait()
        except KeyboardInterrupt:
            progress.end(process)
            raise
    if process.returncode:
        sys.exit(1)  # it has said why


def _works(environment: Path) -> bool:
    """Returns whether there is an environment with pip. One whose making was interrupted may have none."""
    python = environment / "bin/python"
    return python.exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0


def _install_packages(wheel: str, extras: list[str], onnx: str) -> None:
    other = next(name for extra, name in _ONNX_RUNTIMES.items() if extra != onnx)
    if any(_VENV.glob(f"lib/python*/site-packages/{other.replace('-', '_')}-*.dist-info")):
        # The two have the same files, so that removing one of them later would break the other.
        _pip("uninstall", "-y", *_ONNX_RUNTIMES.values())
    _pip("install", "--progress-bar", "off", "-c", "constraints.txt", wheel, "-e", f".[{','.join(extras)}]")


def _pip(*arguments: str) -> None:
    progress.run([str(_VENV / "bin/python"), "-m", "pip", *arguments], "comparing with what is there", _describe)


def _describe(line: str) -> str:
    """Returns what a line of pip's says of its progress."""
    if found := _TO_DOWNLOAD.match(line):
        return f"downloading {found.group(1)}{found.group(2) or ''}"
    if found := _TO_INSTALL.match(line):
        return f"installing {len(found.group(1).split(','))} packages"
    return ""


def has_nvidia_gpu() -> bool:
    """Returns whether this machine has a GPU for which there is an onnxruntime."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    if Path("/dev/nvidia0").exists():
        return True
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=4)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


if __name__ == "__main__":
    main()
