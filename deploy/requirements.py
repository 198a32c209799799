"""Checks what a machine must have before anything is downloaded: each lack is one line with the command that mends
it."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_CXX_PROGRAM = "#include <thread>\n#include <vector>\nint main() { return std::vector<int>().size(); }\n"
_C_PROGRAM = "#include <stdlib.h>\nint main(void) { return EXIT_SUCCESS; }\n"
_HINTS = {
    "compiler": {
        "debian": "apt install g++",
        "fedora": "dnf install gcc-c++",
        "alpine": "apk add g++",
        "arch": "pacman -S gcc",
        "suse": "zypper install gcc-c++",
        "macos": "xcode-select --install",
    },
    "venv": {"debian": "apt install python3-venv", "fedora": "dnf install python3-pip", "alpine": "apk add python3"},
}
"""Commands that install what is missing, by the system's family."""


class LackError(RuntimeError):
    """The machine lacks something. The text is one line that says how to get it."""


def check_venv() -> None:
    """Checks that this Python can make environments. Raises LackError."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise LackError(
            f"this Python can't make virtual environments, since its module ensurepip is missing: {hint('venv')}"
        )


def check_compiler() -> None:
    """Checks that C++ and C can be compiled and linked. Raises LackError."""
    for language, variable, commands, suffix, program in (
        ("C++", "CXX", ("c++", "g++", "clang++"), ".cpp", _CXX_PROGRAM),
        ("C", "CC", ("cc", "gcc", "clang"), ".c", _C_PROGRAM),
    ):
        compiler = os.environ.get(variable) or next(filter(shutil.which, commands), "")
        problem = _compile(compiler, program, suffix) if compiler else "there is none"
        if problem:
            raise LackError(
                f"llama.cpp is compiled once, which needs a {language} compiler; {problem}: {hint('compiler')}"
            )


def _compile(compiler: str, program: str, suffix: str) -> str:
    """Returns why a program can't be compiled; empty if it can."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"try{suffix}"
        source.write_text(program)
        command = [*shlex.split(compiler), str(source), "-o", str(source.with_suffix(""))]
        try:
            done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, text=True)
        except OSError as error:
            return f"{compiler} can't be run ({error.strerror})"
    return "" if done.returncode == 0 else f"{compiler} can't compile a small program"


def check_space(folder: Path, need_mb: int, what: str) -> None:
    """Checks the free space where a folder is, or will be. Raises LackError."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free_mb = shutil.disk_usage(existing).free // 1_000_000
    if free_mb < need_mb:
        raise LackError(f"{what} takes {need_mb:,} MB in {folder}, where {free_mb:,} MB are free")


def hint(what: str) -> str:
    """Returns the command that installs something here; those of several systems if this one is unknown."""
    commands = _HINTS[what]
    for family in _families():
        if family in commands:
            return commands[family]
    names = {"debian": "Debian, Ubuntu", "fedora": "Fedora", "alpine": "Alpine", "macos": "macOS"}
    return ", ".join(f"{commands[family]} ({name})" for family, name in names.items() if family in commands)


def _families() -> Iterator[str]:
    """Yields this system's name and those of the systems that it is made from."""
    if os.uname().sysname == "Darwin":
        yield "macos"
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    for name in f"{fields.get('ID', '')} {fields.get('ID_LIKE', '')}".replace('"', " ").split():
        yield "suse" if "suse" in name else "fedora" if name == "rhel" else name
