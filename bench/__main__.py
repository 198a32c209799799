"""`python -m bench [NAME ...]`: runs the measurements, one after another; without names all that can be run here."""

import argparse
import importlib.util
import os
import subprocess
import sys

QUESTIONS = {
    "sink_or_iterator": ("bench.sink_or_iterator",),
    "idle_check": ("bench.idle_check",),
    "sampling": ("bench.sampling",),
    "first_chunk": ("bench.first_chunk",),
    "frontend_cpu": ("bench.frontend_cpu",),
    "observability": ("bench.observability",),
    "decode_1": ("bench.decode", "--streams", "1"),
    "decode_8": ("bench.decode", "--streams", "8"),
    "conversation": ("bench.conversation",),
    "idle_cache": ("bench.idle_cache",),
    "choice": ("bench.choice",),
    "router_cost": ("bench.router_cost",),
    "many_workers": ("bench.many_workers",),
    "onnx_8": ("bench.onnx_decode", "eight"),
    "onnx_1": ("bench.onnx_decode", "one"),
    "onnx_gguf": ("bench.onnx_decode", "gguf"),
}
"""Those that need nothing but this project."""


AGAINST_LLAMA_CPP = {
    "python_server": ("bench.python_server",),
    "llama_bench_1": ("bench.decode_server", "--streams", "1", "--against", "llama-bench"),
    "llama_bench_8": ("bench.decode_server", "--streams", "8", "--against", "llama-bench"),
    "llama_server_8": ("bench.decode_server", "--streams", "8", "--against", "llama-server"),
    "shared_prefix": ("bench.shared_prefix",),
    "long_prompt": ("bench.long_prompt",),
}
"""Those that need llama.cpp's own programs (bench/llama_server.py), and one its Python server."""


AGAINST_DYNAMO = {
    "choice_dynamo": ("bench.choice_dynamo",),
    "ingest": ("bench.ingest",),
    "index_memory": ("bench.index_memory",),
}
"""Those that need NVIDIA Dynamo's wheel (bench/dynamo_wheel.py)."""


AGAINST_GENAI = {"onnx_genai": ("bench.onnx_decode", "genai")}
"""Those that need onnxruntime-genai."""


def _runnable() -> dict[str, tuple[str, ...]]:
    """Those that have here what they need."""
    found = dict(QUESTIONS)
    if os.environ.get("LLAMA_CPP_BIN"):
        found |= AGAINST_LLAMA_CPP
    if importlib.util.find_spec("dynamo") and importlib.util.find_spec("zmq"):
        found |= AGAINST_DYNAMO
    if importlib.util.find_spec("onnxruntime_genai"):
        found |= AGAINST_GENAI
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = QUESTIONS | AGAINST_LLAMA_CPP | AGAINST_DYNAMO | AGAINST_GENAI
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}: choose from {', '.join(known)}")
    for name in options.names or _runnable():
        print(f"# {name}", flush=True)
        if subprocess.run([sys.executable, "-m", *known[name]], check=False).returncode:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main()
