"""Compares the portable build of llama.cpp with the one of this environment, in CPU time (A B A B).

Run: .venv/bin/python -m bench.serving.portable_build WHEEL --model FILE.gguf [--pairs 9] [--prompt 256] [--tokens 40]

WHEEL is the portable wheel: `python -m deploy.llama_cpp_wheel --portable` prints its path. Each build computes prompts
and decodes in a process of its own, on one thread, with nothing of Tokenbus but the choice of the library. Above 1, the
portable build is slower."""

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from bench import benchmark_model, flags
from bench.baselines import child
from bench.paired import show

_CHILD = "--child"


class _Clock(child.Clock):
    """Notes the CPU time at which the prompt is done."""

    def prompts_are_done(self) -> None:
        self.prompts_done_at = time.process_time()


def _serve(model: str, prompt: int, tokens: int) -> None:
    """Prints the CPU seconds of a prompt and of its answer for each line of standard input."""
    import tokenbus.worker.engine.gguf.backend  # noqa: F401 - loads the library for this processor
    from bench.baselines.bare_llama import BareLlama

    bare, rng = BareLlama(model, 1, prompt + tokens + 64), random.Random(1)
    for _ in sys.stdin:
        clock, began = _Clock(), time.process_time()
        bare.generate([benchmark_model.random_prompt(rng, prompt)], tokens, clock)
        ended = time.process_time()
        print(json.dumps([clock.prompts_done_at - began, ended - clock.prompts_done_at]), flush=True)


def _start(options: argparse.Namespace, model: Path, packages: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.serving.portable_build", _CHILD, str(model)]
    environment = os.environ | {"PYTHONPATH": packages}
    return subprocess.Popen(
        [*command, str(options.prompt), str(options.tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _ask(process: "subprocess.Popen[str]") -> tuple[float, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    prompt_s, decode_s = json.loads(process.stdout.readline())
    return prompt_s, decode_s


def measure(options: argparse.Namespace, model: Path) -> None:
    with tempfile.TemporaryDirectory() as unpacked:
        zipfile.ZipFile(options.wheel).extractall(unpacked)
        start = functools.partial(_start, options, model)
        with start("") as native, start(unpacked) as portable:
            _ask(native), _ask(portable)
            pairs = [(_ask(native), _ask(portable)) for _ in range(options.pairs)]
            for process in (native, portable):
                process.kill()
    for name, column in (("a prompt", 0), ("decoding", 1)):
        print(f" {name}")
        show(("native", "portable"), "s", [(one[column], other[column]) for one, other in pairs], 2)


def main() -> None:
    if sys.argv[1:2] == [_CHILD]:
        _serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = flags.model_parser(__doc__, pairs=9, prompt=256, tokens=40)
    parser.add_argument("wheel", metavar="WHEEL", type=Path)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        measure(options, model)


if __name__ == "__main__":
    main()
