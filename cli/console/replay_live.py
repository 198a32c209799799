"""Replays a trace in real time against a real broker, a real router and simulated workers."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tokenbus.cli.console import nats_server
from tokenbus.cli.console.supervisor import ProcessSupervisor
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.process import signals
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.replay.results import PolicyResult, summarize
from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.simulation import RequestOutcome
from tokenbus.replay.traces import TracedRequest
from tokenbus.replay.virtual_worker import DecodeSteps
from tokenbus.worker.engine.sim.runner import VOCAB_SIZE

_MODEL = "replayed"
_READY_TIMEOUT_S = 120.0
_MAX_REPLICAS = 64
"""Workers per process."""


class LiveError(RuntimeError):
    """The system was not ready in time, or a request did not end as its trace says."""


async def run_live(
    settings: ReplaySettings, policy: str, trace: Sequence[TracedRequest], sim_speedup: float
) -> PolicyResult:
    """Replays the whole trace under one policy, with simulators and arrivals `sim_speedup` times faster than real time.

    Raises LiveError, NatsServerError, StartError and ConnectionError."""
    async with (
        _system(settings, policy, sim_speedup) as url,
        await WireClient.connect(url, encoding=codec.Encoding.MSGPACK) as client,
    ):
        names = await _until_ready(client, settings.workers)
        player = _LivePlayer(client, names, settings, sim_speedup)
        await player.play(trace)
        return summarize(policy, player.outcomes, player.steps, settings.workers)


class _LivePlayer:
    """Sends each request when it is due and records its outcome, with times on the trace's own clock."""

    def __init__(self, client: WireClient, names: list[str], settings: ReplaySettings, sim_speedup: float) -> None:
        self._client = client
        self._settings = settings
        self._numbers = {name: number for number, name in enumerate(names)}
        self._sim_speedup = sim_speedup
        self._began_at = 0.0
        self.outcomes: list[RequestOutcome] = []
        self.steps: list[DecodeSteps] = []

    async def play(self, trace: Sequence[TracedRequest]) -> None:
        self._began_at = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for request in trace:
                    # Arrivals are due at absolute times, so that delays of this loop don't add up.
                    due_s = self._began_at + request.at_s / self._settings.speedup / self._sim_speedup
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                    group.create_task(self._ask(request))
        except BaseExceptionGroup as failed:
            raise LiveError(str(failed.exceptions[0])) from failed

    def _now(self) -> float:
        return (time.monotonic() - self._began_at) * self._sim_speedup

    async def _ask(self, request: TracedRequest) -> None:
        asked = messages.GenerateRequest(
            token_ids=request.token_ids(VOCAB_SIZE).tolist(),
            max_tokens=request.output_tokens,
            ignore_eos=True,
            priority=request.priority,
            routing=messages.RoutingOptions(explain=True),
        )
        arrived_at = self._now()
        placed_at = first_at = before = 0.0
        async for chunk in self._client.generate(_MODEL, asked):
            now = self._now()
            if chunk.worker_id and not placed_at:
                placed_at = now
            # Tokens of one chunk share the time since the chunk before.
            if chunk.tokens and first_at:
                self.steps.append(DecodeSteps(1, ((now - before) / chunk.tokens,) * chunk.tokens))
            elif chunk.tokens:
                first_at = now
            before = now if chunk.tokens else before
        if chunk.finish_reason is not messages.FinishReason.LENGTH or not chunk.usage or not chunk.worker_id:
            reason = chunk.error.message if chunk.error else str(chunk.finish_reason)
            raise LiveError(f"a request of {request.prompt_tokens} tokens did not run to its full length: {reason}")
        worker, cached_tokens = self._numbers[chunk.worker_id], chunk.usage.cached_tokens
        predicted = _predicted(chunk, self._settings.block_size)
        self.outcomes.append(
            RequestOutcome(request, worker, arrived_at, placed_at, first_at, self._now(), cached_tokens, predicted)
        )


def _predicted(terminal: messages.Chunk, block_size: int) -> int:
    """Returns how many prompt tokens the router expected to find cached at the worker it chose."""
    report = terminal.routing
    if not report or not terminal.usage:
        return 0
    chosen = next((one for one in report.candidates if one.worker_id == report.chosen), None)
    return chosen.overlap_blocks * block_size if chosen is not None else 0


@contextlib.asynccontextmanager
async def _system(settings: ReplaySettings, policy: str, sim_speedup: float) -> AsyncIterator[str]:
    """Runs a broker, a router and simulated workers; yields the broker's URL."""
    folder = Path(tempfile.mkdtemp(prefix="tokenbus-replay-"))
    nats = await nats_server.start(0, folder / "nats-server.log")
    supervisor = ProcessSupervisor(folder, print)
    task = asyncio.current_task()
    assert task is not None

    def kill() -> None:
        supervisor.kill()
        nats.kill()

    with signals.on_stop(task.cancel, kill):
        try:
            policy_flags = ["--policy", policy, "--temperature", str(settings.temperature)]
            supervisor.start("router", ["router", "--nats", nats.url, *policy_flags])
            for first in range(0, settings.workers, _MAX_REPLICAS):
                replicas = min(_MAX_REPLICAS, settings.workers - first)
                flags = _worker_flags(settings, replicas, sim_speedup)
                supervisor.start(f"workers-{first}", ["worker", "--nats", nats.url, *flags])
            yield nats.url
            supervisor.check()
        finally:
            await supervisor.stop(5.0)
            nats.stop()


def _worker_flags(settings: ReplaySettings, replicas: int, sim_speedup: float) -> list[str]:
    tokens = settings.kv_blocks * settings.block_size
    values = {
        "--engine": "sim",
        "--model": settings.timing,
        "--served-name": _MODEL,
        "--replicas": replicas,
        "--sim-speedup": sim_speedup,
        "--kv-tokens": tokens,
        "--context-length": tokens,
        "--kv-block-size": settings.block_size,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--step-target-ms": settings.step_target_ms or 60_000,
        "--max-new-tokens": tokens,
        "--grace-s": 1,
    }
    return [str(part) for pair in values.items() for part in pair]


async def _until_ready(client: WireClient, count: int) -> list[str]:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(errors.RequestError):
            cards = (await client.models(timeout_s=2.0)).cards
            if sum(card.state is messages.WorkerState.READY for card in cards) >= count:
                return sorted(card.worker_id for card in cards)
        await asyncio.sleep(0.2)
    raise LiveError(f"not all of {count} workers were ready after {_READY_TIMEOUT_S:g} s")
