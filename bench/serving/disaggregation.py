"""Measures what streams and a long prompt cost each other, with disaggregated prefill and without.

Run: .venv/bin/python -m bench.serving.disaggregation [--model FILE.gguf] [--tokens 1200] [--streams 4] [--prompts 2]
    [--pairs 1]

Two workers with one thread, each on a core of its own, a router and a broker. In each pair, prompts arrive one after
the other under running streams: first at two workers of the role `both`, then at one that computes prompts and one that
decodes. It compares the longest gap of the streams while a prompt is computed, and the time to its first token, the
latter also with that of a lone worker without streams.

Other load on the machine spoils this: if it takes more than 10 % of the CPU time, the result is undecided."""

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench import benchmark_model, flags, streams, system
from bench.paired import Ratio, quartiles
from tokenbus.client.wire.wire_client import WireClient

_MAX_FOREIGN_SHARE = 0.1
_SETTLED = 8
"""Tokens of each stream before the first prompt is sent."""
_MAX_TOKENS = 1_000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_serials = itertools.count()


class Seen(NamedTuple):
    """The results of one fleet."""

    gaps_s: list[float]
    """The longest gap of all streams during each prompt."""
    first_s: list[float]
    """The time to the first token of each prompt."""
    foreign_share: float
    """The share of the machine's CPU time that other processes used."""


class _Stream:
    """One stream, and when its tokens arrived."""

    def __init__(self, client: WireClient) -> None:
        self.times: list[float] = []
        self.settled = asyncio.Event()
        prompt = benchmark_model.prompt(next(_serials), 32)
        self.task = asyncio.create_task(streams.complete(client, prompt, _MAX_TOKENS, self._take))

    def _take(self) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == _SETTLED:
            self.settled.set()

    def longest_gap_s(self, began: float, ended: float) -> float:
        before = max((at for at in self.times if at <= began), default=began)
        during = [at for at in self.times if began < at <= ended]
        return max(after - earlier for earlier, after in itertools.pairwise([before, *during, ended]))


async def _measure(
    model: Path, roles: Sequence[str], num_streams: int, tokens: int, prompts: int, more: Sequence[str]
) -> Seen:
    common = ("--threads", "1", "--context-length", "4096", "--kv-tokens", "16384", *more)
    workers = [(*common, "--role", role, "--worker-id", f"{role}-{place}") for place, role in enumerate(roles)]
    async with system.started(model, *workers, pinned=True) as fleet:
        client, pids = fleet.client, [os.getpid(), fleet.broker_pid, fleet.router_pid, *fleet.worker_pids]
        # a worker's first prompts take longer, and routers learn workers' speeds from them
        await streams.complete(client, benchmark_model.prompt(next(_serials), tokens), 2)
        running = [_Stream(client) for _ in range(num_streams)]
        for one in running:
            await one.settled.wait()
        gaps, firsts, busy_s, own_s = [], [], _busy_s(), _own_s(pids)
        began_at = time.monotonic()
        for _ in range(prompts):
            began = time.perf_counter()
            (first,) = await streams.complete(client, benchmark_model.prompt(next(_serials), tokens), 1)
            firsts.append(first - began)
            if running:
                gaps.append(max(one.longest_gap_s(began, first) for one in running))
        total_s = (time.monotonic() - began_at) * (os.cpu_count() or 1)
        foreign_s = (_busy_s() - busy_s) - (_own_s(pids) - own_s)
        for one in running:
            assert not one.task.done(), "a stream ended before the last prompt: raise _MAX_TOKENS"
            one.task.cancel()
        await asyncio.gather(*(one.task for one in running), return_exceptions=True)
        return Seen(gaps, firsts, max(0.0, foreign_s) / total_s)


def _busy_s() -> float:
    """Returns the CPU seconds of all processes of the machine so far."""
    user, nice, kernel, _, _, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + kernel + sum(rest[:3])) / _TICKS_PER_S


def _own_s(pids: Sequence[int]) -> float:
    """Returns the CPU seconds of some processes and all of their children."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    family = list(pids)
    for pid in family:
        family += [child for child, parent in parents.items() if parent == pid and child not in family]
    return sum(system.cpu_seconds(pid) for pid in family if pid in parents)


async def measure(options: argparse.Namespace, model: Path, more: Sequence[str]) -> None:
    fleets = {"lone": (["both"], 0), "both": (["both", "both"], options.streams)}
    fleets["apart"] = (["prefill", "decode"], options.streams)
    seen: dict[str, list[Seen]] = {name: [] for name in fleets}
    for number in range(options.pairs):
        for name, (roles, num_streams) in fleets.items():
            one = await _measure(model, roles, num_streams, options.tokens, options.prompts, more)
            seen[name].append(one)
            each_gap = ", ".join(f"{gap:.2f}" for gap in one.gaps_s) or "-"
            each_first = ", ".join(f"{first:.1f}" for first in one.first_s)
            print(
                f"  pair {number + 1}, {name}: longest gap {each_gap} s, first token {each_first} s, "
                f"others {one.foreign_share:.0%} of the CPU",
                flush=True,
            )
    gaps = {name: [gap for one in found for gap in one.gaps_s] for name, found in seen.items() if name != "lone"}
    firsts = {name: [first for one in found for first in one.first_s] for name, found in seen.items()}
    gap, first = ({name: statistics.median(each) for name, each in found.items()} for found in (gaps, firsts))
    foreign = max(one.foreign_share for found in seen.values() for one in found)
    print(f"{model.name}, {options.tokens} tokens under {options.streams} streams, two workers of one thread")
    print(
        f"  longest gap   {gap['both']:.2f} s together, {gap['apart']:.2f} s apart: "
        f"{_ratio(gaps['apart'], gaps['both'])} of together"
    )
    print(
        f"  first token   {first['lone']:.1f} s alone, {first['both']:.1f} s together, {first['apart']:.1f} s apart: "
        f"{_ratio(firsts['apart'], firsts['lone'])} of alone"
    )
    verdict = "undecided" if foreign > _MAX_FOREIGN_SHARE else "decided"
    print(f"  others        {foreign:.0%} of the CPU at most: {verdict}")


def _ratio(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """Compares the prompts of two fleets, in order."""
    return quartiles([one / other for one, other in zip(ones, others, strict=True)])


def main() -> None:
    parser = flags.model_parser(__doc__, tokens=1_200, streams=4, prompts=2, pairs=1)
    options, more = parser.parse_known_args()
    with benchmark_model.model(options.model) as model:
        asyncio.run(measure(options, model, more))


if __name__ == "__main__":
    main()
