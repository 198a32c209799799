"""Puts a wheel of llama-cpp-python into a cache outside the clone, compiling it once, and prints its path.

There is only source on PyPI. What Tokenbus does not use of it is left out of the build (the multimodal tools, and
llama.cpp's helper library for its own programs), which takes about three minutes on two cores instead of ten. The wheel
is made for this machine's processor, so the cache is kept apart by processor features.

Usage: llama_cpp_wheel.py VERSION. Variables: TOKENBUS_CACHE (the cache), CMAKE_ARGS (more options for llama.cpp).
"""

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

_LEAN = "set(LLAMA_BUILD_COMMON OFF)\n"


def processor() -> str:
    """What the compiler will see of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())


def cache_folder(version: str) -> Path:
    root = os.environ.get("TOKENBUS_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    extra = os.environ.get("CMAKE_ARGS", "")
    kind = hashlib.sha256(f"{processor()}\n{extra}\n{platform.libc_ver()}".encode()).hexdigest()[:12]
    return Path(root).expanduser() / "tokenbus" / "wheels" / f"llama-cpp-python-{version}-{platform.machine()}-{kind}"


def build(version: str, folder: Path) -> None:
    say(
        f"Compiling llama.cpp for llama-cpp-python {version}: once, about 3 minutes on 2 cores.\n"
        f"PyPI has only its source; the wheel is kept in {folder}, so that later clones take seconds."
    )
    with tempfile.TemporaryDirectory() as scratch:
        lean = Path(scratch) / "lean.cmake"
        lean.write_text(_LEAN)
        options = f"-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_INCLUDE={lean} {os.environ.get('CMAKE_ARGS', '')}".strip()
        cores = str(os.cpu_count() or 1)
        environment = os.environ | {"CMAKE_ARGS": options, "CMAKE_BUILD_PARALLEL_LEVEL": cores}
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", scratch]
        command += ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}"]
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        (wheel,) = Path(scratch).glob("*.whl")
        partial = folder / f".{wheel.name}.{os.getpid()}"
        partial.write_bytes(wheel.read_bytes())
        partial.rename(folder / wheel.name)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    version = sys.argv[1]
    folder = cache_folder(version)
    if not list(folder.glob("*.whl")):
        build(version, folder)
    (wheel,) = folder.glob("*.whl")
    print(wheel)


if __name__ == "__main__":
    main()
