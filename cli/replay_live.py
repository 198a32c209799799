"""Plays a trace against real simulated workers, a real router and a real broker, in real time."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tokenbus.cli import nats_server
from tokenbus.cli.supervisor import SupervisedProcess
from tokenbus.client import Client
from tokenbus.protocol.process import shutdown
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.replay.offline import ReplaySettings
from tokenbus.replay.results import PolicyResult, summarize
from tokenbus.replay.simulation import RequestOutcome
from tokenbus.replay.traces import TracedRequest
from tokenbus.replay.virtual_worker import DecodeSteps
from tokenbus.worker.engine.sim.runner import VOCAB_SIZE

_MODEL = "replayed"
_READY_TIMEOUT_S = 120.0
_REPLICAS = 64
"""Workers in one process, at most."""


class LiveError(RuntimeError):
    """The system could not be started, or did not answer as it must."""


async def run_live(
    settings: ReplaySettings, policy: str, trace: Sequence[TracedRequest], sim_speedup: float
) -> PolicyResult:
    """One policy over the whole trace; the simulators and the requests are `sim_speedup` times faster than real.

    Raises LiveError, NatsServerError, StartError and ConnectionError."""
    async with _system(settings, policy, sim_speedup) as url, await _connect(url) as client:
        names = await _until_ready(client, settings.workers)
        playing = _LivePlayer(client, names, settings, sim_speedup)
        await playing.play(trace)
        return summarize(policy, playing.outcomes, playing.steps, settings.workers)


class _LivePlayer:
    """Sends each request when its time has come, and notes in the trace's time what became of it."""

    def __init__(self, client: Client, names: list[str], settings: ReplaySettings, sim_speedup: float) -> None:
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
        times = dict.fromkeys(("placed", "first"), 0.0)
        before = 0.0
        async for chunk in self._client.generate(_MODEL, asked):
            now = self._now()
            if chunk.worker_id and not times["placed"]:
                times["placed"] = now
            if chunk.tokens and times["first"]:
                self.steps.append(DecodeSteps(1, ((now - before) / chunk.tokens,) * chunk.tokens))
            elif chunk.tokens:
                times["first"] = now
            before = now if chunk.tokens else before
        self._note(request, chunk, arrived_at, times["placed"], times["first"])

    def _note(
        self, request: TracedRequest, terminal: messages.Chunk, arrived_at: float, placed_at: float, first_at: float
    ) -> None:
        if terminal.finish_reason is not messages.FinishReason.LENGTH or not terminal.usage or not terminal.worker_id:
            said = terminal.error.message if terminal.error else str(terminal.finish_reason)
            raise LiveError(f"a request of {request.prompt_tokens} tokens ended otherwise than by its length: {said}")
        self.outcomes.append(
            RequestOutcome(
                request,
                self._numbers[terminal.worker_id],
                arrived_at,
                placed_at,
                first_at,
                self._now(),
                terminal.usage.cached_tokens,
                _predicted(terminal, self._settings.block_size),
            )
        )


def _predicted(terminal: messages.Chunk, block_size: int) -> int:
    """Tokens of the prompt that the router expected to be held where it sent them."""
    report = terminal.routing
    if not report or not terminal.usage:
        return 0
    chosen = next((one for one in report.candidates if one.worker_id == report.chosen), None)
    return chosen.overlap_blocks * block_size if chosen is not None else 0


@contextlib.asynccontextmanager
async def _system(settings: ReplaySettings, policy: str, sim_speedup: float) -> AsyncIterator[str]:
    """A broker, a router, and simulated workers, many to a process."""
    folder = Path(tempfile.mkdtemp(prefix="tokenbus-replay-"))
    nats = await nats_server.start(0, folder / "nats-server.log")
    task = asyncio.current_task()
    assert task is not None
    children = [
        _child("router", ["router", "--policy", policy, "--temperature", str(settings.temperature)], nats, folder)
    ]
    for first in range(0, settings.workers, _REPLICAS):
        count = min(_REPLICAS, settings.workers - first)
        children.append(_child(f"workers-{first}", _worker(settings, count, sim_speedup), nats, folder))
    with shutdown.on_stop(task.cancel, lambda: _end_at_once(children, nats)):
        keepers = [asyncio.create_task(child.supervise()) for child in children]
        try:
            yield nats.url
            for keeper in keepers:
                if keeper.done():
                    keeper.result()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            for child in children:
                child.terminate()
            await asyncio.gather(*(child.wait_stopped(5.0) for child in children))
            nats.stop()


def _end_at_once(children: Sequence[SupervisedProcess], nats: nats_server.NatsServer) -> None:
    for child in children:
        child.kill()
    nats.kill()


def _child(name: str, arguments: list[str], nats: nats_server.NatsServer, folder: Path) -> SupervisedProcess:
    return SupervisedProcess(name, [*arguments, "--nats", nats.url], folder / f"{name}.log", print)


def _worker(settings: ReplaySettings, replicas: int, sim_speedup: float) -> list[str]:
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
    return ["worker", *(str(part) for pair in values.items() for part in pair)]


async def _connect(url: str) -> Client:
    return await Client.connect(url, encoding=codec.Encoding.MSGPACK)


async def _until_ready(client: Client, count: int) -> list[str]:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(errors.RequestError):
            reply = await client.models(timeout_s=2.0)
            cards = [card for served in reply.models for card in served.workers or []]
            if sum(card.state is messages.WorkerState.READY for card in cards) >= count:
                return sorted(card.worker_id for card in cards)
        await asyncio.sleep(0.2)
    raise LiveError(f"not all of {count} workers were ready after {_READY_TIMEOUT_S:g} s")
