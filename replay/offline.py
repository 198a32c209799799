"""Replays one trace under several policies, each in a simulation of its own."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence

import msgspec

from tokenbus.protocol.process import shutdown
from tokenbus.replay import generators, traces
from tokenbus.replay.results import PolicyResult, summarize
from tokenbus.replay.simulation import Simulation, SimulationSettings
from tokenbus.replay.virtual_worker import VirtualWorkerSettings
from tokenbus.router.placement.policies import make_policies
from tokenbus.worker.engine.sim.timing import PRESETS


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """A trace, and the fleet that it is replayed on."""

    trace: str
    """A trace file, or a workload as `generators.parse` takes it."""
    workers: int = 8
    kv_blocks: int = 3_000
    """KV blocks of each worker."""
    block_size: int = 512
    """Tokens of a KV block."""
    speedup: float = 1.0
    """The factor by which requests arrive faster than in the trace."""
    timing: str = "dynamo"
    seed: int = 0
    max_requests: int = 0
    """Replays only the first requests of the trace; 0 replays all."""
    routers: int = 1
    temperature: float = 0.0
    delay_ms: float = 1.0
    """The time that events take to reach a router."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    step_target_ms: float = 0.0
    """The duration that chunks of prompts are sized for; with 0 they are as large as `max_num_batched_tokens`
    allows."""
    speeds: tuple[float, ...] = (1.0,)
    """The factors by which the workers, in turn, are faster than the timing model."""


def load_requests(settings: ReplaySettings) -> list[traces.TracedRequest]:
    """Returns the requests to be replayed, by time. Raises TraceError, WorkloadError and OSError."""
    found = generators.load(settings.trace, settings.seed)
    found = found[: settings.max_requests] if settings.max_requests else found
    longest = max(one.prompt_tokens + one.output_tokens for one in found)
    room = settings.kv_blocks * settings.block_size
    if longest >= room:
        raise traces.TraceError(f"a request has {longest:,} tokens, more than --kv-blocks x --block-size: {room:,}")
    return found


def play(settings: ReplaySettings, policy: str) -> PolicyResult:
    """Replays the whole trace under one policy."""
    simulation = Simulation(_simulation_settings(settings, policy))
    steps = simulation.play(load_requests(settings))
    simulation.check_integrity()
    return summarize(policy, simulation.outcomes, steps, settings.workers)


def play_all(
    settings: ReplaySettings, policies: Sequence[str], jobs: int, prepare: Callable[[], None] | None = None
) -> list[PolicyResult]:
    """Replays the trace under each policy, `jobs` at the same time, which does not change the results. Each process
    that replays calls `prepare` first."""
    if jobs == 1 or len(policies) == 1:
        return [play(settings, policy) for policy in policies]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, prepare) as pool:
        try:
            # the pool's processes inherit this, so that Ctrl-C interrupts only this process
            with shutdown.interrupt_deferred():
                runs = pool.map(play, [settings] * len(policies), policies)
            return list(runs)
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.kill()  # or the pool would wait until they are done
            raise


def _simulation_settings(settings: ReplaySettings, policy: str) -> SimulationSettings:
    workers = tuple(
        VirtualWorkerSettings(
            kv_blocks=settings.kv_blocks,
            block_size=settings.block_size,
            timing=PRESETS[settings.timing],
            speed=settings.speeds[number % len(settings.speeds)],
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            step_target_ms=settings.step_target_ms,
        )
        for number in range(settings.workers)
    )
    return SimulationSettings(
        workers=workers,
        policy=make_policies()[policy],
        seed=settings.seed,
        speedup=settings.speedup,
        num_routers=settings.routers,
        delay_s=settings.delay_ms / 1e3,
        temperature=settings.temperature,
    )
