"""`python -m bench [NAME ...]`: runs the named benchmarks one after another, or all that can run here."""

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Group(NamedTuple):
    """Benchmarks by name, each a module and its flags, that can run where `runnable` says so."""

    runnable: Callable[[], object]
    benchmarks: Mapping[str, str]


GROUPS = (
    Group(
        lambda: True,
        {
            "decode_1": "bench.serving.decode --streams 1",
            "decode_8": "bench.serving.decode --streams 8",
            "first_chunk": "bench.serving.first_chunk",
            "frontend_cpu": "bench.serving.frontend_cpu",
            "conversation": "bench.serving.conversation",
            "next_turns": "bench.serving.next_turns",
            "fetched_blocks": "bench.serving.fetched_blocks",
            "fetched_gaps": "bench.serving.fetched_blocks --gaps",
            "engine_kill": "bench.serving.engine_kill",
            "disaggregation": "bench.serving.disaggregation",
            "gateway_overhead": "bench.gateway.overhead",
            "choice": "bench.router.choice",
            "fleet": "bench.router.fleet",
            "scale": "bench.router.scale",
            "router_cost": "bench.router.router_cost",
            "onnx_1": "bench.serving.decode --against onnxruntime --prompt 64 --tokens 64 --pairs 9 --starts 3",
            "onnx_8": (
                "bench.serving.decode --against onnxruntime --streams 8 --prompt 64 --tokens 64 --pairs 9 --starts 3"
            ),
        },
    ),
    Group(lambda: importlib.util.find_spec("fastapi"), {"python_server": "bench.servers.python_server"}),
    Group(  # llama.cpp's own programs (bench/baselines/llama_server.py)
        lambda: os.environ.get("LLAMA_CPP_BIN"),
        {
            "llama_bench_1": "bench.servers.decode_server --streams 1 --against llama-bench",
            "llama_bench_8": "bench.servers.decode_server --streams 8 --against llama-bench",
            "llama_server_8": "bench.servers.decode_server --streams 8 --against llama-server",
            "structured_server": "bench.servers.structured_server",
            "gateway_server": "bench.gateway.against_llama_server",
            "agent_session": "bench.gateway.agent_session",
            "shared_prefix": "bench.servers.shared_prefix",
            "long_prompt": "bench.servers.long_prompt",
        },
    ),
    Group(  # NVIDIA Dynamo's wheel (bench/baselines/dynamo_wheel.py)
        lambda: importlib.util.find_spec("dynamo") and importlib.util.find_spec("zmq"),
        {
            "choice_dynamo": "bench.router.choice_dynamo",
            "ingest": "bench.router.ingest",
            "index_memory": "bench.router.index_memory",
        },
    ),
    Group(
        lambda: importlib.util.find_spec("onnxruntime_genai"),
        {
            "onnx_genai": (
                "bench.serving.decode --against genai --streams 8 --prompt 64 --tokens 64 --pairs 9 --starts 3"
            )
        },
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = {name: command for group in GROUPS for name, command in group.benchmarks.items()}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}: choose from {', '.join(known)}")
    for name in options.names or [name for group in GROUPS if group.runnable() for name in group.benchmarks]:
        print(f"# {name}", flush=True)
        if subprocess.run([sys.executable, "-m", *known[name].split()], check=False).returncode:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main()
