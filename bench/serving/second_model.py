"""Measures what a model loaded at run time costs an engine process beyond its weights and its KV memory.

Run: .venv/bin/python -m bench.serving.second_model [--model FILE.gguf] [--runs 3] [--tokens 512]

Each run starts a system whose worker serves the demo model and has answered a request, loads the model beside it, and
has that answer a request, too, which fills its KV memory: only what is used of that is resident. Of what the engine
process's resident memory has grown by, the model's planned weights and KV memory are subtracted. The rest is what the
library and this program take for each model: compute buffers, the vocabulary, threads, the loop's tables."""

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

from bench import benchmark_model, flags, system
from bench.paired import quartiles
from tokenbus import demo
from tokenbus.client.wire.wire_client import WireClient

_NAME = "second"
_ANSWER_TOKENS = 16


async def _fill(client: WireClient, model: str, tokens: int) -> None:
    """Has a model answer a request that needs KV memory for so many tokens."""
    prompt = benchmark_model.prompt(0, tokens - _ANSWER_TOKENS)
    async for _ in client.generate(model, token_ids=prompt, max_tokens=_ANSWER_TOKENS, ignore_eos=True):
        pass


def _planned_mib(log: Path) -> float:
    """Returns what the weights and KV memory of the model that was loaded last take."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if '"memory_planned"' in line]
    return float(lines[-1]["weights_mib"] + lines[-1]["kv_mib"])


async def _extra_mib(model: Path, tokens: int) -> float:
    async with system.started(demo.MODEL_PATH, ("--worker-id", "bench", "--max-num-seqs", "6")) as running:
        await _fill(running.client, "m", tokens)
        pid = await system.engine_pid(running.client)
        before = system.resident_mib(pid)
        settings = [f"--set={name}={tokens}" for name in ("context-length", "kv-tokens")]
        settings.append("--set=pooling=none")
        command = ["load", "bench", str(model), "--served-name", _NAME, "--nats", running.nats_url, *settings]
        loading = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tokenbus.cli.start", *command, stdout=subprocess.DEVNULL
        )
        assert not await loading.wait(), command
        await _fill(running.client, _NAME, tokens)
        grown = system.resident_mib(pid) - before
        planned = _planned_mib(running.folder / "worker0.log")
    print(f"  grown by {grown:.0f} MiB, of which weights and KV memory {planned:.0f}", flush=True)
    return grown - planned


async def measure(options: argparse.Namespace, model: Path) -> None:
    extra = [await _extra_mib(model, options.tokens) for _ in range(options.runs)]
    print(f"beyond weights and KV memory: {quartiles(extra)} MiB")


def main() -> None:
    options = flags.model_parser(__doc__, runs=3, tokens=512).parse_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(options, model))


if __name__ == "__main__":
    main()
