"""The flags of `tokenbus replay`, and the settings that they make."""

import argparse
import os
from pathlib import Path

from tokenbus.replay.offline import ReplaySettings
from tokenbus.router.placement.policies import POLICIES, make_policies
from tokenbus.worker.engine.sim.timing import PRESETS

_DEFAULTS = ReplaySettings(trace="")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Everything but the command itself."""
    flag = parser.add_argument
    flag("trace", metavar="TRACE", help="a file in Mooncake's format, gzipped or not, or a workload (docs/routing.md)")
    flag("--policy", default=",".join(POLICIES[:3]), help="policies to compare, with commas (%(default)s)")
    flag("--workers", type=int, default=_DEFAULTS.workers, help="how many (%(default)s)")
    flag("--kv-blocks", type=int, default=_DEFAULTS.kv_blocks, help="of each worker (%(default)s)")
    flag("--block-size", type=int, default=_DEFAULTS.block_size, help="tokens of an engine's block (%(default)s)")
    flag("--speedup", type=float, default=_DEFAULTS.speedup, help="how many times faster requests come (%(default)s)")
    flag("--timing", default=_DEFAULTS.timing, choices=PRESETS, help="how long steps take (%(default)s)")
    flag("--seed", type=int, default=_DEFAULTS.seed, help="of workloads and ties (%(default)s)")
    flag("--max-requests", type=int, default=0, help="only so many of the trace; 0: all")
    flag("--routers", type=int, default=_DEFAULTS.routers, help="routers that share the requests (%(default)s)")
    flag("--delay-ms", type=float, default=_DEFAULTS.delay_ms, help="age of events when heard (%(default)s)")
    flag("--temperature", type=float, default=0.0, help="above 0 dearer workers are drawn now and then (%(default)s)")
    flag("--speeds", default="1", help="speeds of the workers, in turn: 1,1,0.5 (%(default)s)")
    flag("--max-num-seqs", type=int, default=_DEFAULTS.max_num_seqs, help="of a worker (%(default)s)")
    flag("--max-num-batched-tokens", type=int, default=_DEFAULTS.max_num_batched_tokens, help="(%(default)s)")
    flag("--step-target-ms", type=float, default=0.0, help="bounds the prompts of a step; 0: by tokens alone")
    flag(
        "--jobs", type=int, default=os.cpu_count() or 1, help="policies that are played at the same time (%(default)s)"
    )
    flag("--live", action="store_true", help="on real simulated workers, a real router and broker, in real time")
    flag("--sim-speedup", type=float, default=1.0, help="with --live: how many times faster than real (%(default)s)")
    flag("--json", type=Path, metavar="FILE", help="write the numbers; the same for the same seed")
    flag("--html", type=Path, metavar="FILE", help="write plots")


def policies_of(options: argparse.Namespace) -> list[str]:
    """The policies to compare. Raises ValueError."""
    known = make_policies()
    names = [name.strip() for name in options.policy.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"--policy: there is no {name!r}, only {', '.join(known)}")
    return names


def settings_of(options: argparse.Namespace) -> ReplaySettings:
    """What the flags say. Raises ValueError where a number makes no sense."""
    ranges = {
        "workers": (1, 4_096),
        "kv_blocks": (1, 1 << 22),
        "block_size": (1, 1 << 16),
        "speedup": (1e-3, 1e6),
        "max_requests": (0, 1_000_000),
        "routers": (1, 64),
        "delay_ms": (0, 10_000),
        "temperature": (0, 100),
        "max_num_seqs": (1, 4_096),
        "step_target_ms": (0, 60_000),
        "jobs": (1, 1_024),
        "sim_speedup": (0.01, 1_000),
    }
    for name, (low, high) in ranges.items():
        if not low <= getattr(options, name) <= high:
            raise ValueError(f"--{name.replace('_', '-')} must be {low:g} to {high:g}, got {getattr(options, name)}")
    if options.live and (options.routers > 1 or options.speeds != "1"):
        raise ValueError("--live has one router and workers of one speed")
    if not options.max_num_seqs < options.max_num_batched_tokens <= 1 << 20:
        raise ValueError("--max-num-batched-tokens must be above --max-num-seqs, and at most 1,048,576")
    fields = {name: getattr(options, name) for name in ReplaySettings.__struct_fields__ if name != "speeds"}
    return ReplaySettings(**fields, speeds=_speeds(options.speeds))


def _speeds(text: str) -> tuple[float, ...]:
    try:
        speeds = tuple(float(speed) for speed in text.split(","))
    except ValueError:
        speeds = ()
    if not speeds or not all(0.001 <= speed <= 1_000 for speed in speeds):
        raise ValueError(f"--speeds must be numbers of 0.001 to 1,000 with commas, got {text!r}")
    return speeds
