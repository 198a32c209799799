"""One frontend and a bare process beside it, which sends what routers send and hears what clients hear."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from nats.aio.msg import Msg

from tests.sim.network import Broker
from tests.sim.sim_bus import SimBus
from tests.sim.system import MODEL, FrontendProcess
from tests.sim.world import World
from tokenbus.protocol.bus.bus import NoRespondersError, Outgoing
from tokenbus.protocol.wire import block_hash, codec, internal, messages, subjects
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.router.requests.flights.worker_client import WorkerClient
from tokenbus.worker.broker.replica_state import ReplicaEvent

MessageT = TypeVar("MessageT", bound=msgspec.Struct)

NAMES = subjects.Subjects()
KEY = "default:r1"


class Peer:
    """A bare process that sends as a router would, and listens as a client would."""

    def __init__(self, world: World, broker: Broker) -> None:
        self.process = world.process("peer")
        self.bus = SimBus(self.process, broker)
        self.inbox = self.bus.new_inbox()
        self.chunks: list[messages.Chunk] = []
        self.process.do(self.bus.subscribe(self.inbox, self._take))
        self.parts = WorkerClient(self.bus, NAMES, "peer", 1 << 20)
        self.process.do(self.parts.open())

    def _take(self, message: Msg) -> None:
        self.chunks.append(codec.Decoder(messages.Chunk).decode(message.data, codec.Encoding.JSON))

    def ask(self, subject: str, message: messages.Message | bytes) -> bytes | None:
        payload = message if isinstance(message, bytes) else codec.encode(message)
        try:
            return self.process.do(self._ask(Outgoing(subject, payload))).data
        except (TimeoutError, NoRespondersError):
            return None

    async def _ask(self, message: Outgoing) -> Msg:
        return await self.parts.request(await self.parts.sender.stage(message), 0.3)

    def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        self.process.call(self.bus.publish, subject, payload, reply)


class Stage:
    def __init__(self, world: World, token_s: float = 0.1, max_new_tokens: int = 1_024) -> None:
        self.world = world
        self.broker = Broker(world)
        self.frontend = FrontendProcess(world, self.broker, "w0", token_s=token_s, max_new_tokens=max_new_tokens)
        self.peer = Peer(world, self.broker)
        world.run(0.5)

    def run(
        self,
        attempt: int = 1,
        epoch: str | None = None,
        *,
        name: str = "r1",
        router_id: str = "peer",
        max_tokens: int = 20,
        prompt: Sequence[int] = (1, 2, 3),
        **fields: object,
    ) -> internal.RunReply:
        run = internal.Run(
            request_id=f"default:{name}",
            attempt=attempt,
            epoch=self.epoch if epoch is None else epoch,
            router_id=router_id,
            reply=self.peer.inbox,
            encoding=codec.Encoding.JSON,
            token_ids=block_hash.pack_token_ids(prompt),
            params=GenerationParams(max_tokens=max_tokens, return_token_ids=True, seed=1),
            **fields,  # type: ignore[arg-type]
        )
        answer = self.peer.ask(NAMES.worker(MODEL, "w0", "run"), run)
        assert answer is not None
        return codec.Decoder(internal.RunReply).decode(answer)

    def drop(self, attempt: int = 1, *, moved: bool = False) -> bool:
        command = internal.Control(op="drop", request_id=KEY, attempt=attempt, moved=moved)
        answer = self.peer.ask(NAMES.worker(MODEL, "w0", "control"), command)
        assert answer is not None
        return codec.Decoder(internal.ControlReply).decode(answer).ok

    def cancel(self) -> None:
        """Passes on a client's cancel, as a router does."""
        command = internal.Control(op="cancel", request_id=KEY)
        self.peer.publish(NAMES.worker(MODEL, "w0", "control"), codec.encode(command))

    def start_draining(self) -> None:
        """Makes the frontend accept nothing more."""
        self.frontend.process.call(self.frontend.frontend.announcer.change, ReplicaEvent.DRAIN)
        self.world.run(0.01)

    def start_leaving(self) -> None:
        """Makes the frontend leave, so that routers may take its streams."""
        self.start_draining()
        self.frontend.process.call(self.frontend.frontend.announcer.change, ReplicaEvent.LEAVE)
        self.world.run(0.01)

    def take(
        self, known_tokens: int = 0, *, name: str = "r1", attempt: int = 1, router_id: str = "peer"
    ) -> internal.TakeReply | None:
        """Asks for a stream; returns None if there is no answer."""
        take = internal.Take(
            request_id=f"default:{name}", attempt=attempt, known_tokens=known_tokens, router_id=router_id
        )
        answer = self.peer.ask(NAMES.worker(MODEL, "w0", "take"), take)
        return None if answer is None else codec.Decoder(internal.TakeReply).decode(answer)

    def client_resync(self) -> bytes | None:
        """Sends a resync as a client does, which a worker hears only if no router is sure to pass it on."""
        return self.peer.ask(NAMES.resync("r1", model=MODEL), b'{"offset": 0}')

    def resync(self, offset: int) -> bytes | None:
        """Passes on a client's resync, as a router does."""
        command = internal.Control(op="resync", request_id=KEY, body=b'{"offset": %d}' % offset)
        return self.peer.ask(NAMES.worker(MODEL, "w0", "control"), command)

    def snapshot(self, *, wants_others: bool = False, **known_tokens: int) -> internal.SnapshotPart:
        """Returns a snapshot with the tokens of named requests of the default tenant."""
        known = {f"default:{name}": count for name, count in known_tokens.items()}
        asks = wants_others or known
        request = internal.SnapshotRequest(known_tokens=known, wants_others=wants_others) if asks else b""
        part = self.peer.ask(NAMES.worker(MODEL, "w0", "snapshot"), request)
        assert part is not None
        return codec.Decoder(internal.SnapshotPart).decode(part)

    def overhear(self, subject: str, message_type: type[MessageT]) -> list[MessageT]:
        """Returns the list to which every message on a subject is added from now on."""
        heard: list[MessageT] = []
        decoder = codec.Decoder(message_type)
        self.peer.process.do(
            self.peer.bus.subscribe(subject, lambda message: heard.append(decoder.decode(message.data)))
        )
        return heard

    @property
    def epoch(self) -> str:
        return self.snapshot().epoch
