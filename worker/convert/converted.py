"""The cache of conversions: each is kept under its model's fingerprint, and made once for all processes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec
import structlog
import xxhash
from huggingface_hub import constants

from tokenbus.protocol.process.child_environment import child_environment
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import safetensors
from tokenbus.worker.convert.process import STALL_S, ConversionReport, Job
from tokenbus.worker.files import gguf_metadata, model_files, transfer
from tokenbus.worker.files.layouts import SAFETENSORS_SUFFIX, SafetensorsLayout
from tokenbus.worker.files.model_files import ModelFiles, source_name
from tokenbus.worker.files.regular import open_regular
from tokenbus.worker.models import folders

if sys.platform != "win32":
    import fcntl

TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0"),
    *("iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k"),
)
"""The types that `--quantize` takes: those that llama.cpp makes without an importance matrix."""
DEFAULT_TYPE = "f16"
"""The type that every processor computes well; what is faster on one shares its fingerprint."""
_VERSION = 1
"""Raise this when conversions change."""
_POLL_S = 0.5
_SAMPLES = 64
_SAMPLE_BYTES = 4_096
_reports = msgspec.json.Decoder(ConversionReport)


def is_convertible(files: ModelFiles) -> bool:
    return files.weights.suffix == SAFETENSORS_SUFFIX


def folder() -> Path:
    """Returns the folder of all conversions: in the folder named by the user for the Hub's models, or beside the Hub's
    cache."""
    return Path(os.environ.get(folders.HUB_CACHE_VARIABLE) or constants.HF_HOME) / "tokenbus" / "converted"


def list_files() -> list[Path]:
    """Returns the stored conversions."""
    return sorted(folder().glob("*.gguf"))


def remove(name: str) -> int:
    """Removes a conversion by its file's name; returns the bytes freed.

    Raises ModelError if a worker uses it."""
    path = next(path for path in list_files() if path.name == name)
    if model_files.is_held(path):
        raise ModelError(f"{name}: a worker uses it; unload it there first")
    size = path.stat().st_size
    path.unlink()
    return size


def published_type(files: ModelFiles) -> str:
    """Returns the type of a model's matrices, such as bf16; empty if they are of several. Raises ModelError."""
    types = safetensors.matrix_types(_parts(files))
    return types.pop().lower() if len(types) == 1 else ""


def convert(model: str, files: ModelFiles, kind: str, threads: int, progress: Callable[[float], None]) -> ModelFiles:
    """Returns the GGUF of a model in safetensors, with the same sidecars, converting it if necessary.

    `progress` is called with the share done. Raises ModelError, saying what to do, if it can't be converted."""
    job, target = _plan(model, files, kind, threads)
    with _locked(target, progress):
        if not target.exists():
            _check_space(_parts(files), kind, target.parent)
            structlog.get_logger().info("converting_model", path=str(target), file=str(files.weights))
            _run(job, progress)
            Path(job.output).rename(target)
    return ModelFiles(target, files.sidecars)


def convert_as_default(
    model: str, files: ModelFiles, kind: str, threads: int, progress: Callable[[float], None]
) -> ModelFiles:
    """Does the same for a type that the processor has chosen. It gets the fingerprint of the default type, so that it
    makes one fleet with workers on other processors. Only for types that hold the same numbers."""
    made = convert(model, files, kind, threads, progress)
    if kind == DEFAULT_TYPE:
        return made
    job, target = _plan(model, files, DEFAULT_TYPE, threads)
    note = target.with_suffix(".fingerprint")
    with _locked(target, progress):
        if not note.exists():
            if target.exists():
                digest = gguf_metadata.read_sizes(target).fingerprint
            else:
                _run(msgspec.structs.replace(job, is_sampled=True), progress)
                digest = gguf_metadata.read_sizes(Path(job.output)).fingerprint
                Path(job.output).unlink()
            partial = note.with_suffix(".partial")
            partial.write_text(digest)
            partial.rename(note)
        return made._replace(fingerprint=note.read_text())


def _parts(files: ModelFiles) -> list[Path]:
    return [files.weights.with_name(name) for name in SafetensorsLayout().parts_of(files.weights.name)]


def _plan(model: str, files: ModelFiles, kind: str, threads: int) -> tuple[Job, Path]:
    """Returns a conversion, and the name of its file once it is complete."""
    parts = _parts(files)
    name = source_name(model).rpartition("/")[2].partition(":")[0].removesuffix(SAFETENSORS_SUFFIX)
    target = folder() / f"{name}-{_fingerprint(parts, files.sidecars)}-{kind.upper()}.gguf"
    sidecars = {key: str(path) for key, path in files.sidecars.items()}
    return Job(name, list(map(str, parts)), sidecars, kind, threads, str(target.with_suffix(".incomplete"))), target


@contextlib.contextmanager
def _locked(target: Path, progress: Callable[[float], None]) -> Iterator[None]:
    """Lets no other process make the same file meanwhile. Raises ModelError if the folder can't be used."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("w") as lock:
            _lock(lock, progress)
            yield
    except OSError as error:
        problem = f"{target.parent}: {error.strerror or error}"
        raise ModelError(f"{problem}; pass --hub-cache with a folder that this user may write to") from error


def _lock(file: TextIO, progress: Callable[[float], None]) -> None:
    """Waits for another process that may be making the same file. Reports meanwhile: who loads a model and reports
    nothing counts as stuck."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(0.0)
            time.sleep(_POLL_S)
        else:
            return


def _run(job: Job, progress: Callable[[float], None]) -> None:
    """Runs a conversion in a separate process, so that all of its memory is freed when it ends."""
    command = [sys.executable, "-m", "tokenbus.worker.convert.process"]
    with subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment()
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and how says more
                process.stdin.write(msgspec.json.encode(job) + b"\n")
            report = ConversionReport()
            for line in process.stdout:
                report = _reports.decode(line)
                progress(report.done)
        except BaseException:
            process.kill()
            raise
    if process.returncode or report.error:
        Path(job.output).unlink(missing_ok=True)
        ended = f"the conversion ended with status {process.returncode}; is there enough memory?"
        if process.returncode == -signal.SIGALRM:
            ended = f"the conversion was ended, since it got no further for {STALL_S} s"
        raise ModelError(report.error or f"{job.name}: {ended}")


def _fingerprint(parts: list[Path], sidecars: dict[str, Path]) -> str:
    """Hashes the small files and samples of the weights: a few ms regardless of their size."""
    digest = xxhash.xxh3_64(bytes([_VERSION]))
    for path in (*parts, *(sidecars[name] for name in sorted(sidecars))):
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size};".encode())
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _check_space(parts: list[Path], kind: str, where: Path) -> None:
    """Raises ModelError if the disk is too small: a quantized file is made from a plain one of the published size."""
    published = sum(path.stat().st_size for path in parts)
    needed = published if kind in (DEFAULT_TYPE, "bf16") else 2 * published
    free = shutil.disk_usage(where).free
    if needed > free:
        problem = f"needs {transfer.size(needed)} for its conversion, where {transfer.size(free)} are free"
        raise ModelError(f"{where}: {problem}; free some space, or pass --hub-cache on a larger disk")
