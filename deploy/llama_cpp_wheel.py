"""Puts a wheel of llama-cpp-python into a cache outside the clone, compiling it once, and prints its path.

PyPI has only the source. The parts that Tokenbus does not use are left out of the build (the multimodal tools, and
llama.cpp's helper library for its own programs), so that it takes about three minutes on two cores instead of ten. A
wheel is for one kind of processor, so the processor's features are part of its cache folder's name. With --portable it
is for every x86-64: it has llama.cpp's code for nine kinds of processors, of which the best is loaded when an engine
starts. llama.cpp's test vocabularies and its collection of chat templates are kept too: our tests use them, and only
the source has them.

Usage: python -m deploy.llama_cpp_wheel [--portable]. Variables: TOKENBUS_CACHE (the cache), CMAKE_ARGS (more options
for llama.cpp), CC and CXX (the compilers).

Decision 0006 says how the parts are left out.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deploy import progress, requirements

VERSION = "0.3.36"
DOWNLOAD_MB = 75
_BUILD_MB = 500
"""Space for a build in the folder of temporary files: the source, twice, and the compiled files."""
_COMPILED = re.compile(r"\s*\[\s*(\d+/\d+|\d+%)\]")
_LEAN = """
set(LLAMA_BUILD_COMMON OFF)
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag("-mno-amx-tile" CAN_LEAVE_AMX_OUT)
if(CAN_LEAVE_AMX_OUT)
  add_compile_options(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()
"""
"""Every project of the build includes this. Without AMX: GCC drops stores to the tile configuration, of which its own
intrinsic declares 8 bytes of 64 as read, and `ldtilecfg` then ends the process in the first step of a quantized model
(llama.cpp's issue 20824)."""


_LEFT_OUT = ["sandybridge", "piledriver", "cannonlake", "cooperlake", "sapphirerapids"]
"""Of llama.cpp's fourteen variants for x86-64: a lesser one serves the few processors of the first four, and that with
AMX has the problem described above."""
_PORTABLE = f"""
set(GGML_NATIVE OFF)
set(GGML_BACKEND_DL ON)
set(GGML_CPU_ALL_VARIANTS ON)
set(CMAKE_INSTALL_BINDIR llama_cpp/lib)
set(CMAKE_INSTALL_RPATH "$ORIGIN")
if(PROJECT_NAME STREQUAL "llama_cpp")
  file(WRITE "${{CMAKE_BINARY_DIR}}/empty.c" "")
  function(leave_variants_out)
    foreach(variant IN ITEMS {" ".join(_LEFT_OUT)})
      if(TARGET ggml-cpu-${{variant}})
        set_property(TARGET ggml-cpu-${{variant}} PROPERTY SOURCES "${{CMAKE_BINARY_DIR}}/empty.c")
      endif()
    endforeach()
  endfunction()
  cmake_language(DEFER CALL leave_variants_out)
endif()
"""
_UNUSED = [
    *("lib/**", "include/**", "bin/**", "llama_cpp/lib/*.py", "llama_cpp/lib/*.so.*.*"),
    *("llama_cpp/lib/libggml-cpu-*.so.*", *(f"llama_cpp/lib/libggml-cpu-{name}.so" for name in _LEFT_OUT)),
]
"""Left out of wheels: what llama.cpp installs for other programs, and further copies of its libraries."""


def processor() -> str:
    """Returns the processor features that the compiler will detect."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())


def cache() -> Path:
    root = os.environ.get("TOKENBUS_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "tokenbus" / "wheels"


def cache_folder(version: str, *, portable: bool = False) -> Path:
    extra = os.environ.get("CMAKE_ARGS", "")
    made_for = f"{_PORTABLE}{_UNUSED}" if portable else processor()
    made_of = f"{made_for}\n{extra}\n{_LEAN}\n{platform.libc_ver()}"
    kind = hashlib.sha256(made_of.encode()).hexdigest()[:12]
    return cache() / f"llama-cpp-python-{version}-{platform.machine()}-{kind}"


_KEPT = {"vocabularies": "/models/ggml-vocab-", "templates": "/models/templates/"}
"""Files of the source that tests use: a name for each kind, and a part of their paths."""


def kept_folder(version: str, kind: str) -> Path:
    """Returns the folder of one kind of kept files, which don't depend on the processor. It may not exist yet."""
    return cache() / f"llama-cpp-python-{version}-{kind}"


def cached(version: str, *, portable: bool = False) -> Path | None:
    """Returns the wheel for this processor, or the portable one, if it has been compiled."""
    return next(iter(cache_folder(version, portable=portable).glob("*.whl")), None)


def check(version: str, *, portable: bool = False) -> None:
    """Checks, before anything is downloaded, that the wheel is there or can be compiled. Raises LackError."""
    if cached(version, portable=portable) is None:
        requirements.check_compiler()
        requirements.check_space(Path(tempfile.gettempdir()), _BUILD_MB, "compiling llama.cpp")


def build(version: str, *, portable: bool = False) -> None:
    """Compiles the wheel into the cache, or waits while another process does. Raises CommandFailedError."""
    folder = cache_folder(version, portable=portable)
    with _locked(folder), tempfile.TemporaryDirectory() as scratch:
        if cached(version, portable=portable) is not None:
            return
        say(f"  PyPI has only its source; the wheel is kept in {folder}, so that later clones take seconds")
        sdist = download(version, Path(scratch))
        keep(sdist, version)
        wheel = compile_wheel(sdist, Path(scratch), portable=portable)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{wheel.name}.{os.getpid()}"
        partial.write_bytes(wheel.read_bytes())
        partial.rename(folder / wheel.name)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from compiling into a folder of the cache. The lock ends with its process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("  another process is compiling it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download(version: str, scratch: Path) -> Path:
    """Downloads the source distribution from PyPI. Raises CommandFailedError, after printing pip's output."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar", "off"]
    command += ["--dest", str(scratch), "--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}"]
    progress.run(command, f"downloading the source ({DOWNLOAD_MB} MB)", lambda line: "")
    (sdist,) = scratch.glob("*.tar.gz")
    return sdist


def compile_wheel(sdist: Path, scratch: Path, *, portable: bool) -> Path:
    lean = scratch / "lean.cmake"
    lean.write_text(_LEAN + (_PORTABLE if portable else ""))
    options = f"-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_INCLUDE={lean} {os.environ.get('CMAKE_ARGS', '')}".strip()
    cores = str(os.cpu_count() or 1)
    environment = os.environ | {
        "CMAKE_ARGS": options,
        "CMAKE_BUILD_PARALLEL_LEVEL": cores,
        "SKBUILD_WHEEL_EXCLUDE": ";".join(_UNUSED),
    }
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir", "--wheel-dir", str(scratch)]
    progress.run([*command, str(sdist)], "unpacking", _describe, environment)
    (wheel,) = scratch.glob("*.whl")
    return wheel


def _describe(line: str) -> str:
    """Returns what a line of a build's output says of its progress."""
    if found := _COMPILED.match(line):
        return f"compiling: {found.group(1)}"
    return "getting CMake and Ninja" if "build dependencies" in line else ""


def keep(sdist: Path, version: str) -> None:
    """Unpacks the kept files, all or none of each kind, unless they exist."""
    missing = {kind: part for kind, part in _KEPT.items() if not kept_folder(version, kind).exists()}
    cache().mkdir(parents=True, exist_ok=True)
    shown = progress.Progress()
    with tempfile.TemporaryDirectory(dir=cache()) as scratch, tarfile.open(sdist) as archive:
        for kind in missing:
            (Path(scratch) / kind).mkdir()
        for member in archive:
            if not shown.due_s:
                shown.show("unpacking the files that tests use")
            wanted = next((kind for kind, part in missing.items() if part in member.name), None)
            if wanted is not None and (content := archive.extractfile(member)):
                (Path(scratch) / wanted / Path(member.name).name).write_bytes(content.read())
        shown.close()
        for kind in missing:
            _rename(Path(scratch) / kind, kept_folder(version, kind))


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():  # otherwise another process was faster
            raise


def kept(version: str, kind: str) -> Path:
    """Returns the folder of one kind of kept files, downloading them if necessary. Raises CommandFailedError."""
    folder = kept_folder(version, kind)
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            keep(download(version, Path(scratch)), version)
    return folder


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--portable", action="store_true", help="make a wheel for every x86-64 processor")
    portable: bool = parser.parse_args().portable
    try:
        check(VERSION, portable=portable)
        if cached(VERSION, portable=portable) is None:
            build(VERSION, portable=portable)
    except (requirements.LackError, progress.CommandFailedError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    print(cached(VERSION, portable=portable))


if __name__ == "__main__":
    main()
