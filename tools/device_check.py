"""`make device-check`: builds Tokenbus for this machine's NVIDIA GPU, tests and measures it there, and writes a report.

It runs the contract tests of engines, `wire-check` and four benchmarks. All that it makes is in build/device, beside
.venv. With --cpu the same runs on the CPU with the packages of .venv."""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/device"
PYTHON = FOLDER / "venv/bin/python"
BENCHES = {
    "decode": ("--pairs", "7"),
    "first_chunk": ("--pairs", "41"),
    "engine_kill": (),
    "prompt_logprobs": ("--pairs", "7"),
}
_STEP_S = 3_600.0
_TAIL = 30
"""Lines of a step's output that are in the report."""
_BUILD = f"""
wheel=$({sys.executable} -m deploy.llama_cpp_wheel)
{sys.executable} -m venv {FOLDER}/venv
{PYTHON} -m pip install -q -c constraints.txt "$wheel" -e '.[up,bench,onnx-gpu,dev]'
"""
_CUDA = """
import llama_cpp, onnxruntime
print(llama_cpp.llama_print_system_info().decode())
print(f"onnxruntime {onnxruntime.__version__}: {', '.join(onnxruntime.get_available_providers())}")
if not llama_cpp.llama_supports_gpu_offload():
    raise SystemExit("llama.cpp was built, but finds no GPU")
if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
    raise SystemExit("onnxruntime has no CUDAExecutionProvider")
"""


class Result(NamedTuple):
    """The result of one step."""

    name: str
    status: int
    took_s: float
    output: str


def gpus() -> list[str]:
    """Returns the GPUs that NVIDIA's driver lists, with their names."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    return [line for line in done.stdout.splitlines() if line.startswith("GPU")]


def lack(found: Sequence[str]) -> str:
    """Returns what this machine lacks for a check of its GPU; nothing if that can begin."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "onnxruntime with CUDA is for Linux on x86-64 only"
    if not found:
        return "there is no NVIDIA GPU: `nvidia-smi -L` lists none, or is not installed"
    if shutil.which("nvcc") is None:
        return "nvcc is not on the PATH, which compiles llama.cpp for CUDA: install the CUDA toolkit (12.8 or later)"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make device-check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--cpu", action="store_true", help="run it on the CPU, with the packages of .venv")
    names = ["contract tests", "wire-check", *BENCHES]
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=names, default=names, help="only these steps")
    options = parser.parse_args()
    devices = ["none: everything ran on the CPU"] if options.cpu else gpus()
    if missing := "" if options.cpu else lack(devices):
        print(f"device-check: {missing}\nmake device-check ARGS=--cpu runs the same on the CPU", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    python, results = sys.executable, []
    if not options.cpu:
        python = str(PYTHON)
        results.append(_run("build", ["sh", "-ec", _BUILD], CMAKE_ARGS="-DGGML_CUDA=ON"))
        if not results[-1].status:
            results.append(_run("CUDA", [python, "-c", _CUDA]))
    if not any(result.status for result in results):
        steps = {"contract tests": [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contracts"]}
        steps["wire-check"] = ["sh", "-ec", _wire_check(python)]
        steps |= {name: [python, "-m", f"bench.serving.{name}", *flags] for name, flags in BENCHES.items()}
        results += [_run(name, command) for name, command in steps.items() if name in options.only]
    path = FOLDER / "report.md"
    path.write_text(report(devices, results))
    print(f"the report is {path.relative_to(ROOT)}")
    return int(any(result.status for result in results))


def report(devices: Sequence[str], results: Sequence[Result]) -> str:
    """Returns the report as Markdown."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = [f"# Device check of {commit.strip() or 'an unknown version'}", "", *devices, ""]
    lines += ["| step | result | seconds |", "|---|---|---|"]
    for one in results:
        verdict = "ok" if not one.status else f"failed ({one.status})"
        lines.append(f"| {one.name} | {verdict} | {one.took_s:.0f} |")
    for one in results:
        lines += ["", f"## {one.name}", "", "```", *one.output.splitlines()[-_TAIL:], "```"]
    return "\n".join(lines) + "\n"


def _wire_check(python: str) -> str:
    """Returns a script that starts a system with the demo model, checks it and stops it. Says what is on the GPU."""
    tokenbus = f"{python} -m tokenbus.cli.start"
    said = FOLDER / "up.json"
    return f"""
{tokenbus} up --json --port 0 --no-gateway --workers 1 >{said} 2>{FOLDER}/up.log &
up=$!
trap 'kill $up; wait $up || true' EXIT
for _ in $(seq 240); do [ -s {said} ] && break; sleep 0.5; done
url=$({python} -c 'import json; print(json.load(open("{said}"))["nats"])')
{tokenbus} wire-check --nats "$url"
if command -v nvidia-smi >/dev/null; then nvidia-smi --query-compute-apps=pid,used_memory --format=csv; fi
"""


def _run(name: str, command: Sequence[str], **variables: str) -> Result:
    """Runs a step, whose whole output is in a file of its name. It ends with its process."""
    print(f"{name} ...", end=" ", flush=True)
    began = time.monotonic()
    path = FOLDER / f"{name.replace(' ', '-')}.log"
    with path.open("wb") as log:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=_STEP_S,
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = 124
    took_s = time.monotonic() - began
    print(f"{'ok' if not status else f'failed ({status}), see {path.relative_to(ROOT)}'}, {took_s:.0f} s", flush=True)
    return Result(name, status, took_s, path.read_text(errors="replace"))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
