"""Makes a release of the last commit in dist/, and checks each part in an empty folder: `python -m tools.release`.

dist/ gets the source distribution, the wheel, a wheel of llama.cpp for every x86-64 processor, `constraints.txt` with
the versions that were tested, the files from which images are built, a list of all packages of an installation
(CycloneDX), and SHA256SUMS. The same commit gives the same files on every machine, except for llama.cpp's wheel and
the list."""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from deploy import llama_cpp_wheel, progress, requirements
from tokenbus.cli.console import catalog

ROOT = Path(__file__).parents[1]
_NOT_IN_IMAGES = ("tests", "bench", "docs", "tools")
_MADE = ("tokenbus-*.*", "llama_cpp_python-*.whl", "constraints.txt", "SHA256SUMS")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_DATE = re.compile(r"\(\d{4}-\d\d-\d\d\)$")
_TAG = re.compile(r"newTag: ([\w.-]+)")
_QUESTION, _ANSWER = "What is 12 + 30?", "12 + 30 = 42."


class CheckError(RuntimeError):
    """A part of the release is not as it should be."""


_FAILURES = (CheckError, requirements.LackError, progress.CommandFailedError, subprocess.CalledProcessError)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="the folder, whose files are replaced")
    dist: Path = parser.parse_args().dist.absolute()
    if _git("status", "--porcelain"):
        say("there are changes that are not committed; they are not in the release")
    os.environ["SOURCE_DATE_EPOCH"] = _git("log", "-1", "--format=%ct")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            make(dist, Path(scratch))
        except _FAILURES as error:
            sys.exit(str(error))
        except KeyboardInterrupt:
            sys.exit(130)


def make(dist: Path, scratch: Path) -> None:
    source = _unpacked(_archive(scratch / "source.tar.gz", "source"), scratch)
    version: str = tomllib.loads((source / "pyproject.toml").read_text())["project"]["version"]
    check_version(source, version)
    _check_tag(version)
    _empty(dist)
    say(f"Tokenbus {version}: source distribution and wheel")
    (wheel,) = map(Path, WheelBuilder(str(source)).build(directory=str(dist), versions=["standard"]))
    (sdist,) = map(Path, SdistBuilder(str(source)).build(directory=str(dist)))
    prefix = f"tokenbus-{version}-images"
    images = _archive(dist / f"{prefix}.tar.gz", prefix, *(f":(exclude){name}" for name in _NOT_IN_IMAGES))
    for made_from in (sdist, images):
        _check_same(wheel, made_from, scratch)
    _check_licence(wheel, sdist)
    say("llama.cpp for every x86-64 processor")
    shutil.copy(source / "constraints.txt", dist)
    shutil.copy(_llama_cpp(), dist)
    say("an installation of everything, in an empty environment")
    python = _install(wheel, scratch / "environment")
    _check_commands(python, version, scratch)
    _list_packages(python, source, dist / f"tokenbus-{version}.cdx.json")
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(dist.iterdir())}
    (dist / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    say("")
    for path in sorted(dist.iterdir()):
        say(f"{path.stat().st_size / 1e6:8.2f} MB  {path}")


def check_version(source: Path, version: str) -> None:
    """Checks that a source tree's changelog begins with its version, and that the overlays for Kubernetes have the
    last one with a date. Raises CheckError."""
    first, *later = _SECTION.findall((source / "CHANGELOG.md").read_text())
    expected = "Unreleased" if ".dev" in version else f"{version} (year-month-day)"
    if _DATE.sub("(year-month-day)", first) != expected:
        raise CheckError(f"the first section of CHANGELOG.md must be {expected}, not {first}")
    released = next(one.split()[0] for one in (first, *later) if _DATE.search(one))
    for overlay in sorted((source / "deploy/kubernetes/overlays").glob("*/kustomization.yaml")):
        if tags := set(_TAG.findall(overlay.read_text())) - {released}:
            raise CheckError(f"newTag must be {released} in {overlay.relative_to(source)}, not {', '.join(tags)}")


def _check_tag(version: str) -> None:
    tagged = _git("tag", "--list", version)
    if tagged and _git("rev-parse", f"{tagged}^{{commit}}") != _git("rev-parse", "HEAD"):
        raise CheckError(f"{version} is the tag of another commit: set the next version in pyproject.toml")


def _empty(dist: Path) -> None:
    """Makes the folder, or removes an earlier release from it. Raises CheckError if it has other files."""
    dist.mkdir(parents=True, exist_ok=True)
    for path in dist.iterdir():
        if not any(path.match(name) for name in _MADE):
            raise CheckError(f"{path} is not part of a release: --dist must be a folder of its own")
    for path in dist.iterdir():
        path.unlink()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _archive(target: Path, folder: str, *paths: str) -> Path:
    """Packs the files of the last commit, all of them or those that match, in a folder."""
    _git("archive", "--format=tar.gz", f"--prefix={folder}/", "-o", str(target), "HEAD", "--", ".", *paths)
    return target


def _unpacked(archive: Path, scratch: Path) -> Path:
    """Returns the only folder of an archive."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (only,) = folder.iterdir()
    return only


def _check_same(wheel: Path, archive: Path, scratch: Path) -> None:
    """Checks that the wheel made of an archive's files is the released one, byte for byte."""
    target = tempfile.mkdtemp(dir=scratch)
    (made,) = WheelBuilder(str(_unpacked(archive, scratch))).build(directory=target, versions=["standard"])
    if Path(made).read_bytes() != wheel.read_bytes():
        raise CheckError(f"{archive.name} makes another wheel than {wheel.name}")


def _check_licence(wheel: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as packed:
        names = [*zipfile.ZipFile(wheel).namelist(), *packed.getnames()]
    if sum(name.endswith("/LICENSE") for name in names) != 2:
        raise CheckError("the wheel and the source distribution must each have the licence")


def _llama_cpp() -> Path:
    """Returns the wheel of llama.cpp for every processor, compiling it if there is none yet."""
    llama_cpp_wheel.check(llama_cpp_wheel.VERSION, portable=True)
    if llama_cpp_wheel.cached(llama_cpp_wheel.VERSION, portable=True) is None:
        llama_cpp_wheel.build(llama_cpp_wheel.VERSION, portable=True)
    wheel = llama_cpp_wheel.cached(llama_cpp_wheel.VERSION, portable=True)
    assert wheel is not None
    return wheel


def _install(wheel: Path, environment: Path) -> Path:
    """Installs everything from the release's folder with a user's commands. Returns the environment's Python."""
    began_at = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin/python"
    where = ["-c", str(wheel.parent / "constraints.txt"), "--find-links", str(wheel.parent)]
    subprocess.run([python, "-m", "pip", "install", "-q", *where, f"{wheel}[all]"], check=True)
    say(f"  installed in {time.monotonic() - began_at:.0f} s")
    return python


def _check_commands(python: Path, version: str, scratch: Path) -> None:
    (empty := scratch / "empty").mkdir()
    tokenbus = str(python.parent / "tokenbus")

    def output(*arguments: str) -> str:
        done = subprocess.run([tokenbus, *arguments], capture_output=True, text=True, cwd=empty)
        if done.returncode != 0:
            said = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("ok "))
            raise CheckError(f"tokenbus {' '.join(arguments)} ended with {done.returncode}: {said}\n{done.stderr}")
        return done.stdout

    if output("--version") != f"tokenbus {version}\n":
        raise CheckError(f"tokenbus --version says {output('--version')}")
    for command in catalog.COMMANDS:
        output(command, "--help")
    say(f"  --help of {len(catalog.COMMANDS)} commands")
    began_at = time.monotonic()
    with _up(tokenbus, empty) as url:
        if _ANSWER not in (answer := output("generate", "--nats", url, "--model", "demo", _QUESTION)):
            raise CheckError(f"tokenbus generate answered {answer!r}")
        say(f"  a first answer {time.monotonic() - began_at:.1f} s after `tokenbus up`")
        for asked in (["models"], ["top", "--once"]):
            output(*asked, "--nats", url)
        checked = output("wire-check", "--model", "demo", "--wait-s", "60", "--nats", url)
        say(f"  wire-check: {checked.splitlines()[-1]}")
    if list(empty.iterdir()):
        raise CheckError(f"tokenbus leaves files in the current folder: {[one.name for one in empty.iterdir()]}")


@contextlib.contextmanager
def _up(tokenbus: str, folder: Path) -> Iterator[str]:
    """Runs the whole system on free ports, and yields its broker's URL."""
    command = [tokenbus, "up", "--json", "--workers", "1", "--port", "0", "--gateway-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder) as running:
        assert running.stdout is not None
        try:
            if not (line := running.stdout.readline()):
                raise CheckError("tokenbus up did not start")
            yield json.loads(line)["nats"]
        finally:
            running.send_signal(signal.SIGINT)
    if running.returncode != 0:
        raise CheckError(f"tokenbus up ended with {running.returncode}")


def _list_packages(python: Path, source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "cyclonedx_py", "environment", str(python), "--output-reproducible"]
    command += ["--pyproject", str(source / "pyproject.toml"), "--mc-type", "application", "-o", str(target)]
    subprocess.run(command, check=True)
    names = {one["name"] for one in json.loads(target.read_text())["components"]}
    if not {"nats-py", "llama_cpp_python", "onnxruntime"} <= names:
        raise CheckError(f"{target.name} lacks packages: {sorted(names)}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
