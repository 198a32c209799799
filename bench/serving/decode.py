"""Compares the decoding speed of the whole system with a loop written directly on the library that computes.

    python -m bench.serving.decode [--against llama_cpp|onnxruntime|genai] [--streams 1] [--tokens 48] [--prompt 16]
        [--threads 1] [--pairs 7] [--starts 1] [--ubatch 512] [--model PATH]

Both sides get the same prompts, none of which is cached, and generate the same number of tokens with as many threads,
in interleaved pairs. llama.cpp alone computes prompts in parts of `--ubatch` tokens. `onnxruntime` gets one request at
a time; the other two decode all prompts in one batch. Decoding is timed while all streams decode. With `--starts 3`
both sides are restarted twice, because one process may be up to a tenth slower than another of the same program for its
whole life, depending on the memory pages its weights got.
Without --model, it uses a 0.5B model with random weights: Q8_0, or F32 with GroupQueryAttention for ONNX."""

import argparse
import asyncio
import functools
import random
import statistics
from pathlib import Path
from typing import NamedTuple

from bench import benchmark_model, flags, streams, system
from bench.baselines import child
from bench.paired import interleave, quartiles
from bench.streams import Timing

CONTEXT = 4_096
_ROW_CONTEXT = 1_024
_GGUF = ("--kv-tokens", str(CONTEXT), "--max-num-seqs", "64")
_ONNX = ("--engine", "onnx", "--provider", "cpu", "--max-num-seqs", "8")


class Baseline(NamedTuple):
    """A loop in a process of its own, and what our worker needs beside it."""

    module: str
    context: int
    worker: tuple[str, ...]
    one_at_a_time: bool = False


BASELINES = {
    "llama_cpp": Baseline("bench.baselines.bare_llama", CONTEXT, _GGUF),
    "onnxruntime": Baseline("bench.baselines.bare_onnx", _ROW_CONTEXT, _ONNX, one_at_a_time=True),
    "genai": Baseline("bench.baselines.bare_genai", _ROW_CONTEXT, _ONNX),
}


async def pairs_of_one_start(
    options: argparse.Namespace, model: Path, count: int, rng: random.Random
) -> list[tuple[Timing, Timing]]:
    baseline = BASELINES[options.against]
    settings = ("--threads", str(options.threads), *baseline.worker, "--context-length", str(_ROW_CONTEXT))
    with child.running(baseline.module, model, options.threads, baseline.context, options.ubatch) as alone:
        async with system.running(model, *settings) as client:
            complete, engine = functools.partial(streams.complete, client), await system.engine_pid(client)
            prompts: list[list[int]] = []

            async def theirs(_: int) -> Timing:
                prompts[:] = [benchmark_model.random_prompt(rng, options.prompt) for _ in range(options.streams)]
                return await alone(child.Ask(prompts[:1] if baseline.one_at_a_time else prompts, options.tokens))

            async def ours(_: int) -> Timing:
                return await streams.decode(complete, prompts, options.tokens, engine)

            return await interleave(theirs, ours, count)


async def measure(options: argparse.Namespace, model: Path) -> None:
    rng = random.Random(options.seed)
    seen = []
    for start in range(options.starts):
        share = len(range(start, options.pairs, options.starts))
        seen += await pairs_of_one_start(options, model, share, rng)
    show(options, seen)


def show(options: argparse.Namespace, seen: list[tuple[Timing, Timing]]) -> None:
    print(f"{options.streams} streams of {options.tokens} tokens after {options.prompt}, {options.threads} threads")
    print(f"  {'tokens/s':<24} {'prompt':>8} {'decode':>8} {'whole':>8} {'CPU ms/token':>14}")
    num_theirs = 1 if BASELINES[options.against].one_at_a_time else options.streams
    rates = [(_rates(theirs, num_theirs, options), _rates(ours, options.streams, options)) for theirs, ours in seen]
    for name, column in zip((f"{options.against} alone", "the whole system"), zip(*rates, strict=True), strict=True):
        prompt, decode, whole, cpu_ms = (statistics.median(values) for values in zip(*column, strict=True))
        print(f"  {name:<24} {prompt:8.1f} {decode:8.1f} {whole:8.1f} {cpu_ms:14.1f}")
    for place, name in enumerate(("prompt", "decode", "whole")):
        ratio = quartiles([ours[place] / theirs[place] for theirs, ours in rates])
        print(f"  {name} speed, system / alone   {ratio}")
    print(f"  engine CPU, alone / system    {quartiles([theirs[3] / ours[3] for theirs, ours in rates])}")


def _rates(took: Timing, num_streams: int, options: argparse.Namespace) -> tuple[float, float, float, float]:
    """Returns tokens per second of prompts, while decoding and from request to end, and CPU milliseconds a token."""
    return (
        num_streams * options.prompt / took.prompt_s,
        took.decoded / took.decode_s,
        num_streams * options.tokens / took.whole_s,
        1e3 * took.cpu_s / took.decoded,
    )


def main() -> None:
    parser = flags.model_parser(
        __doc__, streams=1, tokens=48, prompt=16, threads=1, pairs=7, starts=1, seed=0, ubatch=512
    )
    parser.add_argument("--against", choices=BASELINES, default="llama_cpp")
    options = parser.parse_args()
    made = benchmark_model.model if options.against == "llama_cpp" else benchmark_model.onnx_model
    with made(options.model) as model:
        asyncio.run(measure(options, model))


if __name__ == "__main__":
    main()
