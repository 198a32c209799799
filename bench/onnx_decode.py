"""How fast is the ONNX engine, against a loop on onnxruntime, against onnxruntime-genai, and against our GGUF engine?

    python -m bench.onnx_decode QUESTION [--model FOLDER] [--threads 1] [--tokens 64] [--pairs 9]

`eight`: eight streams, against one request at a time through a loop written directly on onnxruntime.
`genai`: eight streams, against a batch of eight of onnxruntime-genai (needs that package).
`one`: one stream, against that loop.
`gguf`: one and eight streams, against the same system with the same weights in a GGUF file.

Ours is broker, router, worker and a client, with a cache that holds none of the prompts. Both ways get the same
prompts, make the same number of tokens of each on as many threads, and take turns; decoding is timed while all streams
do it. Both are started anew several times, since a process is up to a tenth slower than another of the same program for
as long as it lives, by the pages that its weights got. Without --model random weights of a 0.5B shape are made, in F32,
for GroupQueryAttention."""

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench import models, streams, system
from bench.child import Ask, Child, Timing
from bench.decode import ratio_of
from tokenbus.client import Client

CONTEXT = 1_024
_ROWS = 8
_ALTERNATIVES = {
    "eight": ("bench.bare_onnx", "onnxruntime, one request at a time", True),
    "genai": ("bench.bare_genai", "onnxruntime-genai, a batch", False),
    "one": ("bench.bare_onnx", "onnxruntime alone", False),
}
"""Module, name, and whether it gets one request at a time."""
_AIMS = {"eight": {8: "   aim 2"}, "genai": {8: "   aim 1"}, "one": {1: "   aim 0.95"}, "gguf": {1: "", 8: ""}}
"""How many streams there are in turn, and what is aimed at with so many."""
Way = Callable[[Ask], Awaitable[Timing]]


class Side(NamedTuple):
    """A way of computing tokens; `one_at_a_time` asks it for the first of the prompts only."""

    name: str
    way: Way
    one_at_a_time: bool = False

    async def measure(self, ask: Ask) -> "Speed":
        ask = Ask(ask.prompts[:1], ask.tokens) if self.one_at_a_time else ask
        took = await self.way(ask)
        return Speed(
            prompt=sum(map(len, ask.prompts)) / took.prompt_s,
            decode=took.decoded / took.decode_s,
            whole=len(ask.prompts) * ask.tokens / took.whole_s,
            cpu_ms=took.cpu_s / took.decoded * 1e3,
        )


class Speed(NamedTuple):
    """The first three in tokens a second."""

    prompt: float
    """Of the prompts, until the last of them has its first token."""
    decode: float
    """While all are decoding."""
    whole: float
    """Made, from the asking to the last."""
    cpu_ms: float
    """CPU time of a token that is decoded, of the process that computes."""


class Pair(NamedTuple):
    theirs: Speed
    ours: Speed


class _Marks:
    """CPU time of the engine when the last stream had its first token, and when the first had its last."""

    def __init__(self, engine_pid: int, ask: Ask) -> None:
        self.begun = self.ended = 0.0
        self._pid = engine_pid
        self._ask = ask
        self._started = 0

    def of_stream(self) -> Callable[[], None]:
        """To be called after each of a stream's tokens."""
        places = itertools.count(1)

        def on_token() -> None:
            place = next(places)
            self._started += place == 1
            if place == 1 and self._started == len(self._ask.prompts):
                self.begun = system.cpu_seconds(self._pid)
            if place == self._ask.tokens and not self.ended:
                self.ended = system.cpu_seconds(self._pid)

        return on_token


async def of_system(client: Client, engine_pid: int, ask: Ask) -> Timing:
    """Streams begin one after another, and so end: decoding is timed where all of them do it."""
    marks = _Marks(engine_pid, ask)
    asked = time.perf_counter()
    times = await asyncio.gather(
        *(streams.complete(client, prompt, ask.tokens, marks.of_stream()) for prompt in ask.prompts)
    )
    begun, ended = max(one[0] for one in times), min(one[-1] for one in times)
    decoded = sum(begun < at <= ended for one in times for at in one)
    if not decoded:
        raise SystemExit("the first stream ended before the last began: pass more --tokens, or a shorter --prompt")
    return Timing(
        prompt_s=begun - asked,
        decode_s=ended - begun,
        cpu_s=marks.ended - marks.begun,
        decoded=decoded,
        whole_s=max(one[-1] for one in times) - asked,
    )


@contextlib.asynccontextmanager
async def our_system(name: str, model: Path, *settings: str) -> AsyncIterator[Side]:
    async with system.running(model, *settings, "--context-length", str(CONTEXT)) as client:
        pid = (await system.card(client)).pids.engine
        yield Side(name, lambda ask: of_system(client, pid, ask))


@contextlib.contextmanager
def child_of(module: str, name: str, one_at_a_time: bool, model: Path, threads: int) -> Iterator[Side]:
    child = Child(module, model, threads, CONTEXT)
    try:
        yield Side(name, lambda ask: asyncio.to_thread(child.generate, ask), one_at_a_time)
    finally:
        child.close()


async def pairs_of(theirs: Side, ours: Side, sizes: "Sizes", count: int, rng: random.Random) -> list[Pair]:
    """One pair goes before that isn't measured. Prompts are new in every pair."""
    seen = []
    for _ in range(count + 1):
        prompts = [[rng.randrange(10, models.VOCABULARY) for _ in range(sizes.prompt)] for _ in range(sizes.streams)]
        ask = Ask(prompts, sizes.tokens)
        seen.append(Pair(await theirs.measure(ask), await ours.measure(ask)))
    return seen[1:]


class Sizes(NamedTuple):
    """What is asked of both."""

    streams: int
    prompt: int
    tokens: int


def show(theirs: str, ours: str, seen: list[Pair], sizes: Sizes, aim: str) -> None:
    print(f"\n{sizes.streams} streams of {sizes.tokens} tokens behind {sizes.prompt}, {len(seen)} interleaved pairs")
    print(f"  {'tokens/s':<36} {'prompt':>8} {'decode':>8} {'whole':>8} {'CPU ms/token':>14}")
    for name, column in ((theirs, [pair.theirs for pair in seen]), (ours, [pair.ours for pair in seen])):
        prompt, decode, whole, cpu_ms = (statistics.median(values) for values in zip(*column, strict=True))
        print(f"  {name:<36} {prompt:8.1f} {decode:8.1f} {whole:8.1f} {cpu_ms:14.1f}")
    print(f"  decode, ours / theirs       {ratio_of([pair.ours.decode / pair.theirs.decode for pair in seen])}{aim}")
    print(f"  prompt, ours / theirs       {ratio_of([pair.ours.prompt / pair.theirs.prompt for pair in seen])}")
    print(f"  whole, ours / theirs        {ratio_of([pair.ours.whole / pair.theirs.whole for pair in seen])}")
    print(f"  CPU, theirs / ours          {ratio_of([pair.theirs.cpu_ms / pair.ours.cpu_ms for pair in seen])}")


@contextlib.asynccontextmanager
async def started(options: argparse.Namespace, model: Path, gguf: Path | None) -> AsyncIterator[tuple[Side, Side]]:
    """Theirs and ours."""
    threads = ("--threads", str(options.threads), "--max-num-seqs", str(_ROWS))
    async with contextlib.AsyncExitStack() as stack:
        onnx = ("--engine", "onnx", "--provider", "cpu")
        ours = await stack.enter_async_context(our_system("tokenbus, ONNX engine", model, *threads, *onnx))
        if gguf is not None:
            memory = ("--engine", "gguf", "--kv-tokens", str(_ROWS * CONTEXT))
            theirs = await stack.enter_async_context(our_system(f"tokenbus, {gguf.name}", gguf, *threads, *memory))
        else:
            theirs = stack.enter_context(child_of(*_ALTERNATIVES[options.question], model, options.threads))
        yield theirs, ours


async def measure(options: argparse.Namespace, model: Path, gguf: Path | None) -> None:
    print(f"{model.name}, {options.threads} threads, {options.starts} starts", flush=True)
    aims = _AIMS[options.question]
    seen: dict[int, list[Pair]] = {count: [] for count in aims}
    rng = random.Random(options.seed)
    for start in range(options.starts):
        async with started(options, model, gguf) as (theirs, ours):
            for count in aims:
                sizes = Sizes(count, options.prompt, options.tokens)
                share = len(range(start, options.pairs, options.starts))
                seen[count] += await pairs_of(theirs, ours, sizes, share, rng)
    for count, aim in aims.items():
        show(theirs.name, ours.name, seen[count], Sizes(count, options.prompt, options.tokens), aim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=_AIMS)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--starts", type=int, default=3, help="of both ways, which share the pairs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(models.onnx_model(options.model))
        gguf = stack.enter_context(models.same_in_gguf(options.gguf)) if options.question == "gguf" else None
        asyncio.run(measure(options, model, gguf))


if __name__ == "__main__":
    main()
