"""Forged workers in the simulated world, which send whatever a test wants."""

import itertools
from collections.abc import Callable

from nats.aio.msg import Msg

from tests.router.builders import card, events
from tests.sim.clients import ClientProcess
from tests.sim.network import Broker
from tests.sim.sim_bus import SimBus
from tests.sim.system import MODEL, RouterProcess
from tests.sim.world import World
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects

NAMES = subjects.Subjects()
GARBAGE = b"\xc1 no MessagePack"

_EPOCHS = itertools.count(100)

Answer = Callable[[Msg], bytes | None]
"""A function from a message to its reply; None means no reply."""


def says(answer: messages.Message | bytes) -> Answer:
    """Returns an answer that is always the same."""
    return lambda message: answer if isinstance(answer, bytes) else codec.encode(answer)


def refuses(code: errors.Code) -> Answer:
    """Returns an answer that refuses with this error."""
    return says(internal.RunReply(accepted=False, error=errors.make_error(code)))


class ForgedWorker:
    """A worker that publishes a card and, if `beats`, events, and answers only on subjects it has answers for."""

    def __init__(
        self,
        world: World,
        broker: Broker,
        worker_id: str,
        *,
        model: str = MODEL,
        beats: bool = True,
        seq: int = 0,
        state: messages.WorkerState = messages.WorkerState.READY,
        digest: str | None = None,
        block_size: int | None = None,
        features: tuple[str, ...] = ("generate", "prompt", "token_ids"),
        **services: Answer,
    ) -> None:
        self.process = world.process(worker_id)
        self.bus = SimBus(self.process, broker)
        self.worker_id = worker_id
        self.state = state
        self.heard: list[str] = []
        """Names of the services that were called, in order."""
        self._card = card(
            worker_id,
            epoch=f"{next(_EPOCHS)}-x",
            model=model,
            features=list(features),
            context_length=4_096,
            max_num_seqs=64,
            tokenizer_digest=digest,
            kv_block_size=block_size,
        )
        self._seq = seq
        self._beats = beats
        self._services = services
        self.process.do(self._open())

    def answer(self, **services: Answer) -> None:
        """Replaces answers from now on."""
        self._services |= services

    def show(self, state: messages.WorkerState) -> None:
        """Changes the state that the next heartbeat reports."""
        self.state = state

    async def _open(self) -> None:
        for service in self._services:
            subject = NAMES.worker(self._card.model, self.worker_id, service)
            await self.bus.subscribe(subject, lambda message, service=service: self._take(service, message))  # type: ignore[misc]
        await self.bus.subscribe(NAMES.discover, lambda message: self._say_card())
        self._say_card()
        self._beat()

    def _take(self, service: str, message: Msg) -> None:
        self.heard.append(service)
        answer = self._services[service](message)
        if answer is not None:
            self.bus.publish(message.reply, answer)

    def _say_card(self) -> None:
        payload = codec.encode(codec.replace(self._card, state=self.state))
        self.bus.publish(NAMES.card(self._card.model, self.worker_id), payload)

    def _beat(self) -> None:
        if self._beats:
            event = events(self.worker_id, self._seq, epoch=self._card.epoch, state=self.state)
            self.bus.publish(NAMES.events(self._card.model, self.worker_id), codec.encode(event))
            self._seq += 1
        else:
            self._say_card()
        self.process.loop.call_later(0.2, self._beat)


class Stage:
    """A simulated router and client, among workers of any kind."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker = Broker(world)
        self.router = RouterProcess(world, self.broker, "r0")
        self.client = ClientProcess(world, self.broker, "c0")
        world.run(0.6)

    def check(self) -> None:
        """Checks that nothing failed and that every stream is consistent."""
        for process in self.world.processes:
            assert process.faults == [], process
        for one in self.client.asked:
            one.check()
        for heard in self.client.heard.values():
            heard.check()

    def until_ended(self, timeout_s: float = 60.0) -> list[str]:
        """Waits for all requests; returns the finish reason or error code of each."""
        self.world.run(0.01)  # in which what was asked for is sent
        self.world.run_until(lambda: not self.client.open(), timeout_s)
        self.check()
        return [_end(one.terminal) for one in self.client.asked]


def _end(terminal: messages.Chunk | None) -> str:
    assert terminal is not None
    return str(terminal.error.code if terminal.error else terminal.finish_reason)
