"""The converting process: `python -m tokenbus.worker.convert.process`, which ends with its parent.

Its standard input is one line of JSON, the job, and stays open as long as the parent lives. It answers with lines of
JSON on standard output: its progress, and finally the error, if any."""

import os
import sys
import threading
from pathlib import Path

import msgspec

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import architectures, config, gguf_file, safetensors, vocabulary


class Job(msgspec.Struct, frozen=True):
    """A conversion."""

    name: str
    weights: list[str]
    sidecars: dict[str, str]
    kind: str
    """The type of the matrices."""
    threads: int
    output: str
    """The file to write, which must not be visible to others before it is complete."""


class ConversionReport(msgspec.Struct, frozen=True):
    """A line of the process's output."""

    done: float = 0.0
    error: str = ""


def _report(report: ConversionReport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


class _Progress:
    """Reports each per cent of one part of the work."""

    def __init__(self, start: float, end: float) -> None:
        self._start, self._end = start, end
        self._reported = 0.0

    def __call__(self, share: float) -> None:
        done = self._start + share * (self._end - self._start)
        if done - self._reported >= 0.01:
            self._reported = done
            _report(ConversionReport(done=round(done, 3)))


def convert(job: Job) -> None:
    """Raises ModelError for a model that can't be converted, and OSError."""
    weights, output = [Path(path) for path in job.weights], Path(job.output)
    where = weights[0].parent
    sidecars = {name: Path(path) for name, path in job.sidecars.items()}
    shape = config.read(sidecars.get("config.json"), where)
    architecture = architectures.architecture_of(shape, where)
    tensors = safetensors.read(weights)
    planned = architectures.plan(architecture, shape, tensors, where)
    words = vocabulary.read(sidecars, shape.vocab_size, where)
    if job.kind in gguf_file.PLAIN:
        gguf_file.write(output, job.name, job.kind, architecture, shape, words, planned, _Progress(0, 1))
        return
    plain = output.with_suffix(".plain")
    kind = planned[0].sources[0].dtype.lower()  # llama.cpp then reads exactly what was published
    try:
        gguf_file.write(plain, job.name, kind, architecture, shape, words, planned, _Progress(0, 0.5))
        from tokenbus.worker.convert import quantize  # llama.cpp is slow to load

        quantize.quantize(plain, output, job.kind, job.threads, _Progress(0.5, 1))
    finally:
        plain.unlink(missing_ok=True)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        convert(job)
    except (ModelError, OSError) as error:
        _report(ConversionReport(error=str(error)))
        os._exit(1)
    _report(ConversionReport(done=1.0))
    os._exit(0)  # the thread that waits for the parent's end can't be joined


if __name__ == "__main__":
    main()
