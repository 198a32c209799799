"""Replays one trace under several policies, each in a simulation of its own."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence

from tokenbus.protocol.process import signals
from tokenbus.replay import generators, traces
from tokenbus.replay.results import PolicyResult, summarize
from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.simulation import Simulation
from tokenbus.router.placement.policies import Policy, make_policies


def load_requests(settings: ReplaySettings) -> list[traces.TracedRequest]:
    """Returns the requests to replay, ordered by time. Raises TraceError, WorkloadError and OSError."""
    found = generators.load(settings.trace, settings.seed)
    found = found[: settings.max_requests] if settings.max_requests else found
    longest = max(one.prompt_tokens + one.output_tokens for one in found)
    room = settings.kv_blocks * settings.block_size
    if longest >= room:
        raise traces.TraceError(f"a request has {longest:,} tokens, more than --kv-blocks x --block-size: {room:,}")
    return found


def play(settings: ReplaySettings, policy: str | Policy) -> PolicyResult:
    """Replays the whole trace under one policy, given by name unless it is none of those that a router has."""
    chosen = make_policies()[policy] if isinstance(policy, str) else policy
    simulation = Simulation(settings, chosen)
    steps = simulation.play(load_requests(settings))
    simulation.check_integrity()
    fetched, computed = simulation.num_fetched_tokens, simulation.num_remote_prefill_tokens
    return summarize(chosen.name, simulation.outcomes, steps, settings.workers, fetched, computed)


def play_all(
    settings: ReplaySettings, policies: Sequence[str], jobs: int, prepare: Callable[[], None] | None = None
) -> list[PolicyResult]:
    """Replays the trace under each policy, `jobs` at a time; results don't depend on `jobs`. Each process that replays
    calls `prepare` first."""
    if jobs == 1 or len(policies) == 1:
        return [play(settings, policy) for policy in policies]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, prepare) as pool:
        try:
            # the pool's processes inherit this, so that Ctrl-C interrupts only this process
            with signals.interrupt_deferred():
                runs = pool.map(play, [settings] * len(policies), policies)
            return list(runs)
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.kill()  # or the pool would wait until they are done
            raise
