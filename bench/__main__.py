"""`python -m bench [NAME ...]`: runs the named benchmarks one after another, or all that can run here."""

import argparse
import importlib.util
import os
import subprocess
import sys

STANDALONE = {
    "sink_or_iterator": ("bench.micro.sink_or_iterator",),
    "idle_check": ("bench.micro.idle_check",),
    "sampling": ("bench.micro.sampling",),
    "first_chunk": ("bench.serving.first_chunk",),
    "frontend_cpu": ("bench.serving.frontend_cpu",),
    "observability": ("bench.serving.observability",),
    "decode_1": ("bench.serving.decode", "--streams", "1"),
    "decode_8": ("bench.serving.decode", "--streams", "8"),
    "structured_1": ("bench.serving.structured", "--streams", "1"),
    "structured_8": ("bench.serving.structured", "--streams", "8"),
    "embed": ("bench.serving.embed",),
    "embed_beside": ("bench.serving.embed_beside",),
    "gateway_overhead": ("bench.gateway.overhead",),
    "conversation": ("bench.serving.conversation",),
    "fetched_blocks": ("bench.serving.kv.fetched_blocks",),
    "fetched_gaps": ("bench.serving.kv.fetched_blocks", "--gaps"),
    "disaggregation": ("bench.serving.kv.disaggregation",),
    "idle_cache": ("bench.serving.kv.idle_cache",),
    "on_demand_first": ("bench.serving.on_demand", "first"),
    "on_demand_gaps": ("bench.serving.on_demand", "gaps"),
    "on_demand_ten": ("bench.serving.on_demand", "ten"),
    "choice": ("bench.router.choice",),
    "router_cost": ("bench.router.router_cost",),
    "large_requests": ("bench.router.large_requests",),
    "next_turn": ("bench.router.next_turn",),
    "many_workers": ("bench.router.many_workers",),
    "onnx_8": ("bench.serving.onnx_decode", "eight"),
    "onnx_1": ("bench.serving.onnx_decode", "one"),
    "onnx_gguf": ("bench.serving.onnx_decode", "gguf"),
}
"""Benchmarks that need nothing but this project."""


AGAINST_LLAMA_CPP = {
    "python_server": ("bench.servers.python_server",),
    "llama_bench_1": ("bench.servers.decode_server", "--streams", "1", "--against", "llama-bench"),
    "llama_bench_8": ("bench.servers.decode_server", "--streams", "8", "--against", "llama-bench"),
    "llama_server_8": ("bench.servers.decode_server", "--streams", "8", "--against", "llama-server"),
    "structured_server": ("bench.servers.structured_server",),
    "gateway_server": ("bench.gateway.against_llama_server",),
    "agent_session": ("bench.gateway.agent_session",),
    "shared_prefix": ("bench.servers.shared_prefix",),
    "long_prompt": ("bench.servers.long_prompt",),
}
"""Benchmarks that need llama.cpp's own programs (bench/baselines/llama_server.py) or its Python server."""


AGAINST_DYNAMO = {
    "choice_dynamo": ("bench.router.choice_dynamo",),
    "ingest": ("bench.router.ingest",),
    "index_memory": ("bench.router.index_memory",),
}
"""Benchmarks that need NVIDIA Dynamo's wheel (bench/baselines/dynamo_wheel.py)."""


AGAINST_GENAI = {"onnx_genai": ("bench.serving.onnx_decode", "genai")}
"""Benchmarks that need onnxruntime-genai."""


def _runnable() -> dict[str, tuple[str, ...]]:
    """Returns the benchmarks whose requirements are met here."""
    found = dict(STANDALONE)
    if os.environ.get("LLAMA_CPP_BIN"):
        found |= AGAINST_LLAMA_CPP
    if importlib.util.find_spec("dynamo") and importlib.util.find_spec("zmq"):
        found |= AGAINST_DYNAMO
    if importlib.util.find_spec("onnxruntime_genai"):
        found |= AGAINST_GENAI
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = STANDALONE | AGAINST_LLAMA_CPP | AGAINST_DYNAMO | AGAINST_GENAI
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}: choose from {', '.join(known)}")
    for name in options.names or _runnable():
        print(f"# {name}", flush=True)
        if subprocess.run([sys.executable, "-m", *known[name]], check=False).returncode:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main()
