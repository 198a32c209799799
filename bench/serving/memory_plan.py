"""Measures how much memory an engine takes while a session grows, compared with what it planned on defaults.

Run: .venv/bin/python -m bench.serving.memory_plan [--model FILE.gguf] [--begin 20000] [--turn 5000] [--end 60000]

One worker without a setting for any size serves prompts that each begin with the one before, like those of a coding
agent. Run it in a control group of 8 GiB to see what is chosen there. Without --model, it uses a 0.5B model with random
weights that claims to be trained for 131,072 tokens."""

import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench import flags, streams, system
from bench.models import benchmark_model, random_model
from bench.models.shape import PRESETS
from tokenbus.worker.engine.memory import claims

_CONTEXT = 131_072
_SAMPLE_S = 0.5
_ANSWER_TOKENS = 32


class Peak(NamedTuple):
    """The engine process's peak memory in bytes."""

    resident: int = 0
    """All of its resident memory, mapped weights included."""
    copies: int = 0
    """Copies of blocks, which are in a file in memory."""

    @property
    def total(self) -> int:
        return self.resident + self.copies


def logged(folder: Path, event: str) -> dict[str, int]:
    lines = (json.loads(line) for line in (folder / "worker.log").read_text().splitlines() if line.startswith("{"))
    return next(line for line in lines if line["event"] == event)


def sample(pid: int) -> Peak:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return Peak(
        next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:")), claims.copies_bytes(pid)
    )


async def watch(pid: int, peaks: list[Peak]) -> None:
    while True:
        peaks.append(sample(pid))
        await asyncio.sleep(_SAMPLE_S)


async def measure(model: Path, begin: int, turn: int, end: int, worker: list[str]) -> None:
    async with system.started(model, worker) as one:
        plan, pid = logged(one.folder, "memory_planned"), logged(one.folder, "engine_ready")["pid"]
        loaded, peaks = sample(pid), [Peak()]
        watching = asyncio.create_task(watch(pid, peaks))
        prompt = benchmark_model.prompt(1, begin)
        began = time.monotonic()
        while True:
            await streams.complete(one.client, prompt, _ANSWER_TOKENS)
            highest = max(peaks, key=lambda one: one.total)
            print(
                f"  {len(prompt):6} tokens, {time.monotonic() - began:5.0f} s: {highest.total >> 20:,} MiB, "
                f"{highest.copies >> 20:,} of these copies",
                flush=True,
            )
            if len(prompt) >= end:
                break
            prompt = benchmark_model.prompt(1, min(end, len(prompt) + turn))
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    highest = max(peaks, key=lambda one: one.total)
    sums = ", ".join(f"{name} {plan[f'{name}_mib']:,}" for name in ("weights", "kv", "buffers", "host_cache"))
    print(f"{model.name}: context {plan['context_length']:,}, KV for {plan['kv_tokens']:,} tokens, in MiB")
    print(f"  planned   {plan['planned_mib']:,} ({sums}) of {plan['free_mib']:,} free")
    print(f"  loaded    {loaded.total >> 20:,}")
    print(f"  highest   {highest.total >> 20:,}, {highest.total / (plan['planned_mib'] << 20):.3f} of the plan")


def main() -> None:
    parser = flags.model_parser(__doc__, begin=20_000, turn=5_000, end=60_000)
    options, worker_flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder:
        model = options.model or Path(folder, "random-0.5b-q8_0.gguf")
        if options.model is None:
            random_model.write(model, PRESETS["0.5b"]._replace(context=_CONTEXT), "q8_0", threads=2)
        asyncio.run(measure(model, options.begin, options.turn, options.end, worker_flags))


if __name__ == "__main__":
    main()
