"""Frontends and routers as simulated processes."""

import asyncio
import contextlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tests.sim.engine import TimedEngine
from tests.sim.network import Broker
from tests.sim.sim_bus import SimBus
from tests.sim.world import Process, World
from tokenbus.protocol.telemetry.tracing import NoopTracer
from tokenbus.protocol.wire import subjects
from tokenbus.protocol.wire.cards import WorkerRole
from tokenbus.router.serve import Router
from tokenbus.router.settings import RouterSettings
from tokenbus.worker.broker.fence import FENCE_S
from tokenbus.worker.broker.lifeline import Lifeline
from tokenbus.worker.replica.frontend import Frontend, ReplacedError
from tokenbus.worker.replica.replica import leave
from tokenbus.worker.settings.settings import FrontendSettings
from tokenbus.worker.telemetry.metrics import ReplicaMetrics, WorkerMetrics

MODEL = "sim"
LIMITS = (20, 40)
"""Tokens that different workers allow a request without `max_tokens`."""
_START_S = 0.3
_HANDOVER_S = 15.0
"""Time that routers have to take the streams of a worker that leaves."""
_GRACE_S = 1.0
"""Time that requests have to reach a worker before a router stops."""


class SimReplica:
    """One worker of a process. Its first engine takes `load_s` to start; it can die and is then restarted."""

    def __init__(
        self,
        process: Process,
        line: Lifeline,
        name: str,
        settings: FrontendSettings,
        restart_s: float,
        max_num_seqs: int,
        token_s: float,
        load_s: float | None,
        model: str,
        config: Mapping[str, Any],
    ) -> None:
        self.process = process
        self.name = name
        self._config = config
        self._restart_s = restart_s
        self._load_s = load_s
        self._shape = (max_num_seqs, token_s)
        metrics = ReplicaMetrics(WorkerMetrics(), model, name)
        self.frontend = Frontend(line, subjects.Subjects(), model, name, settings, metrics, NoopTracer())
        self.engine: TimedEngine | None = None

    async def open(self) -> None:
        await self.frontend.open()
        if self._load_s == 0:
            self._start_engine()
        elif self._load_s is not None:
            self.process.loop.call_later(self._load_s, self._start_engine)

    def _start_engine(self) -> None:
        self.engine = TimedEngine(*self._shape)
        self.engine.config = msgspec.structs.replace(self.engine.config, **self._config)
        self.engine.step_done = self.frontend.step_done
        self.frontend.engine_started(self.engine, self.engine.config)

    def engine_dies(self) -> None:
        self.process.call(self._engine_dies)

    def _engine_dies(self) -> None:
        if self.engine is None:
            return
        engine, self.engine = self.engine, None
        self.frontend.engine_died()
        engine.die()
        self.frontend.step_done()
        self.process.loop.call_later(self._restart_s, self._start_engine)

    async def leave(self, handover_s: float | None) -> None:
        """Leaves, while other workers of the process may stay."""
        self.frontend.drain.request(handover_s=handover_s)
        await leave(self.frontend, self._end_engine, 0.0, _HANDOVER_S)
        self.frontend.announce_stopped()

    async def _end_engine(self) -> None:
        if self.engine is not None:
            self.engine.die()
            self.frontend.step_done()


class FrontendProcess:
    """A worker process, most often with one worker."""

    def __init__(
        self,
        world: World,
        broker: Broker,
        name: str,
        max_num_seqs: int = 4,
        token_s: float = 0.1,
        restart_s: float = _START_S,
        max_new_tokens: int = FrontendSettings.max_new_tokens,
        beside: Sequence[str] = (),
        site: str = "",
        load_s: float | None = 0.0,
        model: str = MODEL,
        role: WorkerRole = WorkerRole.BOTH,
        config: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        """`beside` names more workers of the process; `site` is where it says that it runs; `load_s` is how long each
        model takes to load, None if it never has loaded; `config` is what engines say of themselves that others
        don't."""
        settings = FrontendSettings(debug=True, max_new_tokens=max_new_tokens, site=site, role=role)
        self.name = name
        self.process = world.process(name)
        self.bus = SimBus(self.process, broker)
        self.incoming = SimBus(self.process, broker)
        self.replicas: list[SimReplica] = []
        self._shape = (settings, restart_s, max_num_seqs, token_s, load_s, model, config)
        self._line = Lifeline(self.bus, self.incoming, subjects.Subjects(), name)
        for one in (name, *beside):
            self.add(one)
        self._on_reconnect = self.bus.on_reconnect
        self.life = self.process.spawn(self._line.run())
        self.process.spawn(self._end_if_replaced())

    async def _end_if_replaced(self) -> None:
        """Ends the process, as a real one does, if another one has started later under its name."""
        try:
            await self.frontend.wait_replaced()
        except ReplacedError:
            kill(self.process, self.bus, self.incoming)

    def add(self, name: str) -> SimReplica:
        """Starts another worker in the process."""
        return self.process.do(self._add(name))

    async def _add(self, name: str) -> SimReplica:
        replica = SimReplica(self.process, self._line, name, *self._shape)
        self.replicas.append(replica)
        await replica.open()
        return replica

    @property
    def frontend(self) -> Frontend:
        return self.replicas[0].frontend

    @property
    def engine(self) -> TimedEngine | None:
        return self.replicas[0].engine

    def engine_dies(self) -> None:
        self.replicas[0].engine_dies()

    def drain(self, handover_s: float | None = None) -> None:
        """Stops it, without giving its streams time to finish."""
        self.process.call(lambda: self.process.spawn(self._drain(handover_s)))

    async def _drain(self, handover_s: float | None) -> None:
        await asyncio.gather(*(replica.leave(handover_s) for replica in self.replicas))
        await asyncio.sleep(0)  # its last messages leave at the end of a turn
        kill(self.process, self.bus, self.incoming)

    def fence_twice(self) -> None:
        """Makes it fence itself, and again in the next epoch, whose card never leaves the process."""
        if self.bus.link is not None:
            self.bus.link.hears = False
            self.bus.on_reconnect = self._reconnected_in_vain

    def _reconnected_in_vain(self) -> None:
        assert self.bus.link is not None
        self.bus.link.stall(4.0)
        self.bus.on_reconnect = self._on_reconnect
        self._on_reconnect()
        # the timer of an idle process would look at the fence up to 400 ms later
        self.process.loop.call_later(FENCE_S, self._line.check_fence)


class RouterProcess:
    def __init__(
        self,
        world: World,
        broker: Broker,
        name: str,
        patterns: tuple[str, ...] = (),
        *,
        site: str = "",
    ) -> None:
        """`patterns` are those of its models."""
        self.name = name
        self.process = world.process(name)
        self.bus = SimBus(self.process, broker)
        self.process.spawn(self._live(world, RouterSettings(model_patterns=patterns, site=site)))

    async def _live(self, world: World, settings: RouterSettings) -> None:
        self.router = Router(self.bus, subjects.Subjects(), self.name, settings, world.rng, NoopTracer())
        await self.router.open()
        await self.router.run()

    def leave(self) -> None:
        """Stops it."""
        self.process.call(lambda: self.process.spawn(self._leave()))

    async def _leave(self) -> None:
        await self.router.stop_intake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self.router.drain()
        await self.router.shut_down()
        await asyncio.sleep(0)
        kill(self.process, self.bus)


def kill(process: Process, *buses: SimBus, lingers: bool = True) -> None:
    """Kills a process and its connections, like kill -9. Without `lingers` its machine dies with it: whatever is in
    transit to the broker is lost, even if that is the second half of a write."""
    process.kill()
    for bus in buses:
        bus.cut(lingers=lingers)
