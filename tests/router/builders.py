"""Builders for the messages of workers, and for fleets that have received them."""

import random
from collections.abc import Sequence

from tokenbus.protocol.wire import block_hash, codec, internal, messages, subjects
from tokenbus.router.access.limits import Limits, TenantLimits
from tokenbus.router.access.quota import Quota
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.worker import Worker

READY = messages.WorkerState.READY
DRAINING, RESTARTING, STARTING, STOPPED = (
    messages.WorkerState.DRAINING,
    messages.WorkerState.RESTARTING,
    messages.WorkerState.STARTING,
    messages.WorkerState.STOPPED,
)
LOAD_OF_3 = messages.Load(running=2, waiting=1)


def free_quota() -> Quota:
    """Returns limits that no client has."""
    limits = Limits(TenantLimits(), {}, None)
    return Quota(limits, None, subjects.Subjects(), "r", None, RouterMetrics(), random.Random(1))  # type: ignore[arg-type]


def at(worker_id: str, model: str = "demo") -> subjects.WorkerAddress:
    """Returns a worker's address, for the model `demo` unless another is named."""
    return subjects.WorkerAddress(model, worker_id)


def card(worker_id: str = "w1", *, epoch: str = "100-a", model: str = "demo", **changes: object) -> messages.Card:
    fields: dict[str, object] = {
        "source": "demo.gguf",
        "engine": "gguf",
        "engine_version": "1",
        "context_length": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "hash_scheme": "xxh3-64:0",
        "features": ["generate"],
        "state": READY,
        "host": "here",
        "pids": messages.Pids(front=1, engine=2),
        "versions": {},
    }
    return messages.Card(worker_id=worker_id, epoch=epoch, model=model, **(fields | changes))  # type: ignore[arg-type]


def events(
    worker_id: str = "w1",
    seq: int = 0,
    *,
    epoch: str = "100-a",
    load: messages.Load = messages.Load(),  # noqa: B008
    state: messages.WorkerState = READY,
    started: tuple[str, ...] = (),
    tokens: Sequence[tuple[int, int]] = (),
    finished: tuple[str, ...] = (),
    stored: tuple[internal.BlockRun, ...] = (),
    removed: tuple[int, ...] = (),
    cleared: bool = False,
) -> internal.Events:
    return internal.Events(
        worker_id=worker_id,
        epoch=epoch,
        seq=seq,
        load=load,
        state=state,
        started=[
            internal.Started(id=key, stream_no=number, attempt=1, prompt_tokens=1)
            for number, key in enumerate(started, start=1)
        ],
        stream_nos=block_hash.pack_token_ids([stream_no for stream_no, _ in tokens]),
        token_ids=block_hash.pack_token_ids([token_id for _, token_id in tokens]),
        finished=list(finished),
        stored=list(stored),
        removed=list(removed),
        cleared=cleared,
    )


def stored(hashes: Sequence[int]) -> tuple[internal.BlockRun, ...]:
    """Returns one run of blocks at the start of a chain, as events report it."""
    return (internal.BlockRun(parent=0, hashes=list(hashes)),) if hashes else ()


def flight(request_id: str = "r1", *, tenant: str = "default", received_at: float = 0.0, **fields: object) -> Flight:
    request = messages.GenerateRequest(id=request_id, prompt="hi", **fields)  # type: ignore[arg-type]
    return Flight(request, subjects.ModelAddress("demo", tenant), "_INBOX.a", codec.Encoding.JSON, received_at)


def part(
    worker_id: str = "w1",
    seq: int = 0,
    *,
    epoch: str = "100-a",
    number: int = 0,
    parts: int = 1,
    running: tuple[str, ...] = (),
    runs: tuple[internal.BlockRun, ...] = (),
) -> internal.SnapshotPart:
    return internal.SnapshotPart(
        worker_id=worker_id,
        epoch=epoch,
        seq=seq,
        part=number,
        parts=parts,
        runs=list(runs),
        running=[internal.RunningRequest(id=key, attempt=1, stream_no=1) for key in running],
        load=messages.Load(),
    )


def fleet_of(*cards: messages.Card, now: float = 0.0) -> Fleet:
    fleet = Fleet(began_at=0.0)
    for one in cards:
        fleet.apply_card(one, now)
    return fleet


def known(fleet: Fleet, worker_id: str = "w1") -> Worker:
    worker = fleet.find_worker(at(worker_id))
    assert worker is not None
    return worker


def named(workers: list[Worker]) -> list[str]:
    return [worker.card.worker_id for worker in workers]


def candidates(fleet: Fleet, now: float, model: str = "demo") -> list[str]:
    """Returns the workers that may be given a request now."""
    return named(fleet.model(model).eligible(now))


def expired(fleet: Fleet, now: float) -> list[str]:
    return [lost.card.worker_id for lost in fleet.expire_leases(now)]


def forget_silent(fleet: Fleet, now: float) -> None:
    for lost in fleet.expire_leases(now):
        fleet.remove(lost.card)


class NoLoads:
    """Stands for `ModelLoads` where every model is loaded."""

    def check(self) -> None: ...

    def close(self) -> None: ...

    def progress_of(self, model: str) -> None: ...

    async def wait_served(self, model: str, timeout_s: float | None, is_over: object = None) -> bool:
        return False
