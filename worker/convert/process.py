"""The converting process: `python -m tokenbus.worker.convert.process`, which ends with its parent.

It reads what strangers have written, so its memory is limited, and so is the time between two reports.

Its standard input is one line of JSON, the job, and stays open as long as the parent lives. It answers with lines of
JSON on standard output: its progress, and finally the error, if any."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from tokenbus.protocol.process import memory, priority
from tokenbus.protocol.process.cores import usable_cores
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import architectures, config, encoder, gguf_file, safetensors, vocabulary
from tokenbus.worker.convert.architectures import PlannedTensor
from tokenbus.worker.files import device_memory

STALL_S = 600
"""Without a report for so long the process ends."""
_OWN_BYTES, _CORE_BYTES = 1 << 30, 64 << 20
"""The memory of libraries, a vocabulary and pieces of tensors, and that of a thread."""
_WEIGHT_COPIES = 4
"""llama.cpp quantizes a tensor as a whole, in 32 bits."""


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
    is_sampled: bool = False
    """Whether only that of it is to be written of which its fingerprint is made."""


class ConversionReport(msgspec.Struct, frozen=True):
    """A line of the process's output."""

    done: float = 0.0
    error: str = ""


def _report(report: ConversionReport) -> None:
    if signal.alarm(0):  # this process ends without reports
        signal.alarm(STALL_S)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


_Plan = tuple[list[PlannedTensor], Callable[..., None]]
"""The tensors to write, and what writes them, given a path, a name, a type and `progress`."""


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
    plan = _plan_encoder if encoder.is_one(sidecars.get("config.json")) else _plan_decoder
    planned, write = plan(weights, sidecars, where)
    if job.kind in gguf_file.PLAIN:
        write(output, job.name, job.kind, progress=_Progress(0, 1), is_sampled=job.is_sampled)
        return
    plain = output.with_suffix(".plain")
    kind = planned[0].sources[0].dtype.lower()  # llama.cpp then reads exactly what was published
    try:
        write(plain, job.name, kind, progress=_Progress(0, 0.5))
        from tokenbus.worker.convert import quantize  # llama.cpp is slow to load

        quantize.quantize(plain, output, job.kind, job.threads, _Progress(0.5, 1))
    finally:
        plain.unlink(missing_ok=True)


def _plan_decoder(weights: list[Path], sidecars: dict[str, Path], where: Path) -> _Plan:
    shape = config.read(sidecars.get("config.json"), where)
    architecture = architectures.architecture_of(shape, where)
    planned = architectures.plan(architecture, shape, safetensors.read(weights), where)
    words = vocabulary.read(sidecars, shape.vocab_size, where)
    metadata = partial(gguf_file.add_metadata, architecture=architecture, config=shape, vocabulary=words)
    factors = gguf_file.rope_factors(shape)
    return planned, partial(
        gguf_file.write, architecture=architecture.name, add_metadata=metadata, tensors=planned, factors=factors
    )


def _plan_encoder(weights: list[Path], sidecars: dict[str, Path], where: Path) -> _Plan:
    shape = encoder.read_config(sidecars["config.json"])
    planned = encoder.plan(shape, safetensors.read(weights), where)
    words = encoder.read_words(sidecars.get("tokenizer.json"), shape.vocab_size, where)
    metadata = partial(gguf_file.add_encoder_metadata, config=shape, words=words, sidecars=sidecars)
    return planned, partial(gguf_file.write, architecture=encoder.NAME, add_metadata=metadata, tensors=planned)


def _limit_memory(job: Job) -> None:
    weights = sum(os.path.getsize(path) for path in job.weights)
    wanted = _OWN_BYTES + usable_cores() * _CORE_BYTES + _WEIGHT_COPIES * weights
    memory.end_first()
    memory.limit_own(min(wanted, device_memory.free_host_bytes() // 8 * 7))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _fail(problem: str) -> NoReturn:
    _report(ConversionReport(error=problem))
    os._exit(1)


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.alarm(STALL_S)
    try:
        priority.go_last()
        _limit_memory(job)
        convert(job)
    except (ModelError, OSError) as error:
        _fail(str(error))
    except MemoryError:
        _fail(f"{job.name}: a conversion of its size needs more memory than it may have")
    except Exception as error:  # outermost frame
        _fail(f"{job.name}: can't be converted: {type(error).__name__}: {error}")
    _report(ConversionReport(done=1.0))
    os._exit(0)  # the thread that waits for the parent's end can't be joined


if __name__ == "__main__":
    main()
