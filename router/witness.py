"""Learns from the broker that a silent worker's process is gone, long before its lease expires (decision 0012).

A process hears a subject of its own, `alive`, over the connection that it publishes on. When the process ends, its
machine's kernel closes that connection, and the broker drops the subscription after everything that had come over it.
So a question on that subject that has no responders proves two things: the process is not connected any more, and all
that it has sent has been passed on.

It may only have lost its connection, though, and come back in the same epoch. So each side raises a flag before it
looks at the other's, and the broker sees both:

    router      subscribes to `given_up`, then asks on `alive`       no responders: the epoch is over
    process     subscribes to `alive`, then asks on `given_up`       no responders: it goes on where it was

Whoever comes second finds the other's flag. The router's stays up for as long as the process could come back.

Where a broker's answers do not tell of a worker that is there, they tell nothing of one that is not: so a router asks
about each worker once when it announces itself.

A broker knows the subscriptions at other brokers of its cluster only while they are connected. A worker at another
broker is given up only if something was heard from there between two such answers. Workers of other clusters, of
earlier versions, and those whose machine is gone with its connections still open are lost when their lease expires."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import Bus, NoRespondersError, Outgoing
from tokenbus.protocol.bus.reply_inbox import ReplyInbox
from tokenbus.protocol.wire import codec, internal, limits, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.workers.worker import Worker

QUIET_S = 0.2
"""Silence after which the broker is asked. A worker that has work publishes something within `limits.HEARTBEAT_S`."""
_ASK_AGAIN_S = 0.1
_PATIENCE_S = 0.1
"""Time for the broker's answer; if there is none, somebody hears the subject."""

_SURE_PATIENCE_S = 0.3
_MAKE_SURE_AGAIN_S = 10.0
_LOOK_AGAIN_S = 1.0
_MAX_LOOKED_FOR = 32
"""Lost workers whose successors are looked for at a time."""
_DROP_OF_NOTHING = codec.encode(internal.Control(op="drop", request_id="default:none", attempt=0))
"""Asks a worker for an answer, and nothing else."""


class BrokerWitness:
    """Asks the broker about silent workers that have requests of this router."""

    def __init__(
        self,
        bus: Bus,
        names: subjects.Subjects,
        fleet: Fleet,
        busy: Callable[[], set[subjects.WorkerAddress]],
        on_gone: Callable[[Worker], None],
    ) -> None:
        """`busy` returns the workers that have requests of this router; `on_gone` is called with one whose epoch is
        over: nothing of it is on its way any more, and it publishes nothing again."""
        self._bus = bus
        self._names = names
        self._fleet = fleet
        self._busy = busy
        self._on_gone = on_gone
        inbox = bus.new_inbox()
        self._inbox = ReplyInbox(bus, lambda token: f"{inbox}.{token}")
        self._asking: dict[str, asyncio.Task[None]] = {}
        """The examinations that run, by incarnation."""
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = 0.0
        self._is_permitted = True
        """False once the broker's permissions have forbidden this router to say that it gives a worker up."""

    def __repr__(self) -> str:
        return f"<BrokerWitness of {len(self._asking)} workers>"

    async def open(self) -> None:
        """Subscribes to the broker's answers."""
        await self._inbox.open()

    def close(self) -> None:
        """Ends all examinations."""
        for task in (*self._asking.values(), *((self._looking,) if self._looking else ())):
            task.cancel()

    def forbid(self) -> None:
        """Learns that this router may not say that it gives a worker up: from now on only leases count."""
        self._is_permitted = False

    def tick(self, now: float) -> None:
        """Begins to examine workers that have fallen silent, and to look for the successors of lost ones."""
        if now - self._looked_at >= _LOOK_AGAIN_S and (lost := self._fleet.lost.all(now)):
            self._looked_at = now
            if self._looking is None or self._looking.done():
                self._looking = tasks.background("look for lost workers", self._look_for(lost[-_MAX_LOOKED_FOR:]))
        if not self._is_permitted:
            return
        for address in self._busy():
            worker = self._fleet.find_worker(address)
            if worker is None or worker.incarnation in self._asking or not self._may_prove(worker):
                continue
            if not worker.is_witnessed:
                self.meet(worker)
            elif _is_quiet(worker, now):
                self._start(worker, self._examine(worker))

    def meet(self, worker: Worker) -> None:
        """Makes sure, once, that the broker tells of a worker that has announced itself."""
        if self._is_permitted and self._may_prove(worker) and worker.incarnation not in self._asking:
            self._start(worker, self._make_sure(worker))

    def _start(self, worker: Worker, work: Coroutine[Any, Any, None]) -> None:
        name = worker.incarnation
        task = self._asking[name] = tasks.background("ask the broker about a worker", work)
        task.add_done_callback(lambda _: self._asking.pop(name, None))

    async def _look_for(self, lost: Sequence[Worker]) -> None:
        """Finds out which lost workers have a successor that has not announced itself yet, since its model loads."""
        for worker in lost:
            card = worker.card
            subject = self._names.worker(card.model, card.worker_id, "control")
            try:
                await self._inbox.request(Outgoing(subject, _DROP_OF_NOTHING), limits.ACCEPT_TIMEOUT_S)
                worker.has_successor = True
            except (NoRespondersError, TimeoutError, ConnectionError):
                worker.has_successor = False

    def _may_prove(self, worker: Worker) -> bool:
        """Whether the broker's answers can prove anything: not of workers that don't say how they are connected."""
        card = worker.card
        return bool(card.process_run) and card.network == self._bus.network

    async def _make_sure(self, worker: Worker) -> None:
        """Finds out once, while a worker is heard of, whether the broker tells of its subscription: questions may not
        get through to where the worker is, as between accounts of a broker."""
        signs = worker.num_signs
        is_absent = await self._is_absent(worker, _SURE_PATIENCE_S)
        await asyncio.sleep(_ASK_AGAIN_S)
        worker.is_witnessed = not is_absent and self._bus.is_connected
        if is_absent and worker.num_signs != signs:
            await asyncio.sleep(_MAKE_SURE_AGAIN_S)

    async def _examine(self, worker: Worker) -> None:
        if not await self._is_absent(worker):
            return
        absent_since, card = time.monotonic(), worker.card
        given_up = await self._bus.subscribe(self._names.given_up(*card.address, card.epoch), _ignore)
        try:
            while self._is_silent(worker):
                # before the question: the brokers were connected after the first answer, and know what has changed
                is_in_reach = card.broker == self._bus.broker_id or self._is_heard(worker, absent_since)
                if not await self._is_absent(worker):
                    return
                if is_in_reach and self._is_permitted and self._is_silent(worker):
                    self._on_gone(worker)
                    await asyncio.sleep(limits.WORKER_LOST_AFTER_S)
                    return
                await asyncio.sleep(_ASK_AGAIN_S)
        finally:
            await self._bus.unsubscribe(given_up)

    def _is_silent(self, worker: Worker) -> bool:
        is_current = self._fleet.find_worker(worker.card.address) is worker
        return is_current and not worker.lease_expired and _is_quiet(worker, time.monotonic())

    def _is_heard(self, silent: Worker, since: float) -> bool:
        """Whether another process at the same broker as a silent worker was heard since."""
        mine = silent.card
        return any(
            one.last_seen_at > since and one.card.broker == mine.broker and one.card.process_run != mine.process_run
            for _, workers in self._fleet.models()
            for one in workers
        )

    async def _is_absent(self, worker: Worker, patience_s: float = _PATIENCE_S) -> bool:
        """Asks the broker whether nobody hears that a worker's process is connected."""
        card = worker.card
        subject = self._names.alive(card.model, card.worker_id, card.process_run)
        try:
            await self._inbox.request(Outgoing(subject, b""), patience_s)
        except NoRespondersError:
            return True
        except (TimeoutError, ConnectionError):
            pass
        return False


def _is_quiet(worker: Worker, now: float) -> bool:
    return now - worker.last_seen_at >= QUIET_S


def _ignore(message: Msg) -> None:
    """A worker that asks whether its epoch was given up needs no answer but that somebody hears it."""
