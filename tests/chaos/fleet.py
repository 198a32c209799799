"""The processes of a round, and the faults that are carried out on them."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.plans import Fault
from tests.support.exact_client import until_ready
from tests.support.raw_client import RawClient
from tests.support.system import System
from tokenbus import demo

NUM_LANES = 40
"""Requests that a worker can run at the same time: the 32 open ones, and some that their clients have given up."""
STOP_S = 60.0
"""Time within which a process that is asked to stop must end."""
LEAVES_S = 1.0
"""Time from a gateway's last new connection to its stop, as from a load balancer that takes it out first."""
GATEWAY_GRACE_S = 300.0
"""Time within which the streams of a gateway that stops must end: no other gateway can continue them."""
_START_S = 60.0
"""Time within which a process must serve, beyond the time that its model takes to load."""
_POLL_S = 0.05
_READY = {"worker": "engine_ready", "router": "router_ready", "gateway": "gateway_ready"}


class Fleet:
    """Routers and workers. One that is gone is started again or replaced."""

    def __init__(
        self,
        system: System,
        engine: str,
        num_workers: int,
        step_ms: float,
        kv_tokens: int,
        *,
        num_gateways: int = 0,
        loses_events: bool = False,
        load_s: float = 0.0,
        pythons: Mapping[str, Path] | None = None,
    ) -> None:
        """With `loses_events`, some entries of the simulated workers' event logs are lost. A simulated worker that is
        started after the first ones takes `load_s` to load its model, as real ones do. `pythons` are of other versions'
        environments, by group: `worker`, `router` and `gateway`."""
        self._system = system
        self._pythons = dict(pythons or {})
        self._num_named: Counter[str] = Counter()
        self._all_workers: list[str] = []
        self.workers = [self._new_name("worker") for _ in range(num_workers)]
        self.routers = [self._new_name("router") for _ in range(2)]
        self.gateways = [self._new_name("gateway") for _ in range(num_gateways)]
        self._flags = ["--grace-s", "0", "--max-num-seqs", str(NUM_LANES), "--kv-tokens", str(kv_tokens)]
        self._model = demo.MODEL_PATH
        self._faults: list[str] = []
        self._load_s = load_s
        self._slow_load: list[str] = []
        """The fault of a worker that is started after the first ones."""
        if engine == "sim":
            self._flags += ["--engine", "sim", "--sim-speedup", f"{50 / step_ms:g}"]
            self._faults = ["lose@200"] if loses_events else []
            self._slow_load = [f"load@{1e3 * load_s:.0f}"] if load_s else []
            self._model = Path("steps-of-50ms")

    def __repr__(self) -> str:
        return f"<Fleet {self.routers} {self.workers}>"

    async def start(self) -> None:
        for name in self.routers + self.workers + self.gateways:
            self._start(name, is_first=True)

    async def until_up(self, bare: RawClient, num_ready: int | None = None) -> None:
        """Waits until every process serves, and a router confirms it of the workers, or until `num_ready` workers do
        while the others may be loading."""
        for name in self.routers + self.gateways + (self.workers if num_ready is None else []):
            await self._until_serving(name)
        if num_ready is None:
            await until_ready(bare, len(self.workers))
            return
        timeout_s = _START_S + self._load_s
        async with asyncio.timeout(timeout_s):
            while sum(map(self._is_serving, await until_ready(bare, num_ready, timeout_s))) < num_ready:
                await asyncio.sleep(_POLL_S)  # a router may not know yet that one was killed

    def _is_serving(self, card: dict[str, Any]) -> bool:
        """Whether a card is that of a running process, which is ready."""
        return card["state"] == "ready" and card["pids"]["front"] == self._system.pid(card["worker_id"])

    def accepted_ids(self) -> set[str]:
        """Returns the ids of all requests that a worker has accepted."""
        logs = (self._system.log(name, event="request_started") for name in self._all_workers)
        return {_request_id(line) for lines in logs for line in lines}

    async def carry_out(self, fault: Fault, open_ids: Callable[[], set[str]]) -> bool:
        """Carries out a fault; returns False if there was no process that it could strike.

        `open_ids` returns the ids of the streams that clients are reading at that moment."""
        worker = self.workers[fault.target % len(self.workers)]
        router = self.routers[fault.target % len(self.routers)]
        match fault.kind:
            case "kill_worker" | "kill_while_loading":
                self._restart(self.workers[fault.number % len(self.workers)])
            case "kill_engine":
                for pid in self._pids(worker, "engine"):
                    os.kill(pid, signal.SIGKILL)
            case "pause_worker":
                await _freeze(self._pids(worker, fault.part), fault.pause_s)
            case "pause_router":
                await _freeze(self._system.family(router), fault.pause_s)
            case "kill_router_then_worker":
                return await self._kill_router_then_worker(router, fault.between_s, open_ids)
            case "restart_broker":
                await self._system.restart_broker(fault.away_s)
            case "drain_worker":
                await self._replace(worker, is_beside=fault.is_beside)
            case "roll":
                names = self.workers + self.routers + self.gateways
                first = fault.target % len(names)
                for name in names[first:] + names[:first]:  # a client's connection to a gateway has no other end
                    await self._replace(name, is_beside=fault.is_beside or name in self.gateways)
            case _:
                raise ValueError(fault.kind)
        return True

    async def change_version(self, group: str, python: Path) -> None:
        """Replaces the processes of a group, one after another, by those of another version: every second one, and
        every gateway, once its successor is ready, the others before."""
        self._pythons[group] = python
        for number, name in enumerate([*self._group(group)]):
            await self._replace(name, is_beside=group == "gateway" or number % 2 == 0)

    def gateway_ports(self) -> list[int]:
        """Returns the ports of the gateways that take requests."""
        ready = (self._system.logged(name, "gateway_ready") for name in self.gateways)
        return [urlsplit(str(lines[-1]["url"])).port or 0 for lines in ready if lines]

    async def _kill_router_then_worker(self, router: str, between_s: float, open_ids: Callable[[], set[str]]) -> bool:
        """Kills a router, and later the worker that has most of the streams placed by this router."""
        placed = {_request_id(line): line["worker_id"] for line in self._system.log(router, event="request_placed")}
        self._restart(router)
        await asyncio.sleep(between_s)
        counts = Counter(str(placed[one]) for one in open_ids() if one in placed)
        if counts:
            self._restart(counts.most_common(1)[0][0])
        return bool(counts)

    async def _replace(self, name: str, *, is_beside: bool) -> None:
        """Asks a process to stop, and starts its successor: before that under a new name, or afterwards under the same
        name."""
        kind = name.partition("-")[0]
        if is_beside:
            group, successor = self._group(kind), self._new_name(kind)
            self._start(successor)
            await self._until_serving(successor)
            group[group.index(name)] = successor
            if kind == "gateway":
                await asyncio.sleep(LEAVES_S)
        self._system.signal(name, signal.SIGTERM)
        status = await self._system.wait(name, STOP_S + (GATEWAY_GRACE_S if kind == "gateway" else 0.0))
        if status:
            raise ChildProcessError(f"{name} stopped with status {status}")
        if not is_beside:
            self._start(name)
            await self._until_serving(name)

    def _restart(self, name: str) -> None:
        self._system.kill(name)
        self._start(name)

    def _new_name(self, group: str) -> str:
        self._num_named[group] += 1
        name = f"{group}-{self._num_named[group]}"
        self._all_workers += [name] if group == "worker" else []
        return name

    def _start(self, name: str, *, is_first: bool = False) -> None:
        group = name.partition("-")[0]
        python = self._pythons.get(group)
        if group == "router":
            self._system.router(name, python=python)
        elif group == "gateway":
            self._system.gateway(name, "--grace-s", f"{GATEWAY_GRACE_S:g}", python=python)
        else:
            faults = self._faults + ([] if is_first else self._slow_load)
            flags = [*self._flags, "--sim-faults", ",".join(faults)] if faults else self._flags
            self._system.worker(name, *flags, model=self._model, python=python)

    def _group(self, kind: str) -> list[str]:
        return {"worker": self.workers, "router": self.routers, "gateway": self.gateways}[kind]

    async def _until_serving(self, name: str) -> None:
        await self._system.until_logged(name, _READY[name.partition("-")[0]], _START_S + self._load_s)

    def _pids(self, worker: str, part: str) -> list[int]:
        front, *engine = self._system.family(worker)
        return {"front": [front], "engine": engine, "both": [front, *engine]}[part]


async def _freeze(pids: Sequence[int], seconds: float) -> None:
    with _frozen(pids):
        await asyncio.sleep(seconds)


@contextlib.contextmanager
def _frozen(pids: Sequence[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # an engine may be killed by its frontend
                os.kill(pid, signal.SIGCONT)


def _request_id(line: dict[str, object]) -> str:
    """Returns the id of the request that a log line names, without its tenant."""
    return str(line["request_id"]).partition(":")[2]
