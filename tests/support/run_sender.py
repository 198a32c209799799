"""Sends runs to workers as a router would, for measurements and tests of workers."""

import asyncio
import itertools
import time
from collections import Counter

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from tokenbus.protocol.wire import block_hash, codec, internal, messages
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.protocol.wire.subjects import Subjects

_cards = codec.Decoder(messages.Card)
_chunks = codec.Decoder(messages.Chunk)
_events = codec.Decoder(internal.Events)
_replies = codec.Decoder(internal.RunReply)


class Streamed:
    """The chunks of one stream."""

    def __init__(self) -> None:
        self.chunks: list[messages.Chunk] = []
        self.terminals: list[messages.Chunk] = []
        self.arrived_at: list[float] = []
        """When each token arrived."""
        self.changed = asyncio.Event()

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids or ()]

    async def take(self, message: Msg) -> None:
        if message.data:
            chunk = _chunks.decode(message.data, codec.Encoding.MSGPACK)
            self.chunks.append(chunk)
            self.arrived_at += [time.perf_counter()] * chunk.tokens
            self.terminals += [chunk] if chunk.finish_reason else []
            self.changed.set()

    async def until_tokens(self, count: int) -> None:
        """Waits for this many tokens."""
        async with asyncio.timeout(300):
            while len(self.arrived_at) < count:
                self.changed.clear()
                await self.changed.wait()

    async def terminal(self) -> messages.Chunk:
        async with asyncio.timeout(300):
            while not self.terminals:
                self.changed.clear()
                await self.changed.wait()
        return self.terminals[0]


class RunSender:
    """A router that places nothing: a test says which worker gets which run."""

    def __init__(self, client: Client, model: str = "demo") -> None:
        self.nats = client
        self.model = model
        self.cards: dict[str, messages.Card] = {}
        self.fetches: list[internal.Fetched] = []
        self.remote_prefills: list[str] = []
        """Keys of requests whose prompts workers have begun to compute for others."""
        self.num_stored: Counter[str] = Counter()
        """Blocks that each worker has reported as stored."""
        self.num_removed = 0
        """Blocks that workers have reported as removed."""
        self._told = asyncio.Event()
        self._numbers = itertools.count()
        self._names = Subjects()

    @staticmethod
    async def connect(url: str) -> Client:
        return await nats.connect(url)

    async def open(self, *worker_ids: str) -> None:
        """Waits until these workers serve."""

        async def take_card(message: Msg) -> None:
            card = _cards.decode(message.data, codec.Encoding.MSGPACK)
            self.cards[card.worker_id] = card

        async def take_events(message: Msg) -> None:
            told = _events.decode(message.data, codec.Encoding.MSGPACK)
            self.fetches += told.fetches
            self.remote_prefills += told.legs
            self.num_stored[told.worker_id] += sum(len(run.hashes) for run in told.stored)
            self.num_removed += len(told.removed)
            self._told.set()

        await self.nats.subscribe(f"tokenbus.v1.card.{self.model}.*", cb=take_card)
        await self.nats.subscribe(f"tokenbus.v1.events.{self.model}.*", cb=take_events)
        async with asyncio.timeout(300):
            while not set(worker_ids) <= {name for name, card in self.cards.items() if card.state == "ready"}:
                await self.nats.publish("tokenbus.v1.discover", b"")
                await asyncio.sleep(0.1)

    def source(self, worker_id: str, epoch: str | None = None) -> internal.FetchSource:
        return internal.FetchSource(worker_id=worker_id, epoch=epoch or self.cards[worker_id].epoch)

    async def cancel(self, worker_id: str, request_id: str) -> None:
        """Passes on a cancel of a request of the default tenant, and waits until the worker has answered it."""
        command = internal.Control(op="cancel", request_id=f"default:{request_id}", body=b"{}")
        await self.nats.request(self._names.worker(self.model, worker_id, "control"), codec.encode(command))

    async def run(
        self,
        worker_id: str,
        token_ids: list[int],
        *,
        fetch_from: internal.FetchSource | None = None,
        tenant: str = "default",
        remaining_ms: float | None = None,
        adapters: tuple[block_hash.Adapter, ...] = (),
        **params: object,
    ) -> Streamed:
        streamed = Streamed()
        inbox = self.nats.new_inbox()
        await self.nats.subscribe(inbox, cb=streamed.take)
        asked: dict[str, object] = {"max_tokens": 8, "temperature": 0.0, "return_token_ids": True, "ignore_eos": True}
        run = internal.Run(
            request_id=f"{tenant}:r-{next(self._numbers)}",
            attempt=1,
            epoch=self.cards[worker_id].epoch,
            router_id="test",
            reply=inbox,
            encoding=codec.Encoding.MSGPACK,
            token_ids=block_hash.pack_token_ids(token_ids),
            params=GenerationParams(**asked | params),  # type: ignore[arg-type]
            adapters=[internal.RunAdapter(digest=one.digest, scale=one.scale) for one in adapters],
            fetch_from=fetch_from,
            remaining_ms=remaining_ms,
        )
        subject = self._names.worker(self.model, worker_id, "run")
        reply = _replies.decode((await self.nats.request(subject, codec.encode(run), timeout=10)).data)
        assert reply.accepted, reply
        return streamed

    async def ask(self, worker_id: str, token_ids: list[int], **options: object) -> Streamed:
        streamed = await self.run(worker_id, token_ids, **options)  # type: ignore[arg-type]
        await streamed.terminal()
        return streamed

    async def until_fetched(self, count: int) -> internal.Fetched:
        """Waits for the event that reports the end of fetch number `count`."""
        async with asyncio.timeout(30):
            while len(self.fetches) < count:
                self._told.clear()
                await self._told.wait()
        return self.fetches[count - 1]

    async def until_remote_prefill(self, count: int) -> None:
        """Waits until workers have begun to compute this many prompts for others."""
        async with asyncio.timeout(30):
            while len(self.remote_prefills) < count:
                self._told.clear()
                await self._told.wait()

    async def until_stored(self, worker_id: str, count: int) -> None:
        """Waits until a worker has reported this many blocks as stored."""
        async with asyncio.timeout(30):
            while self.num_stored[worker_id] < count:
                self._told.clear()
                await self._told.wait()

    async def until_removed(self, num_before: int) -> None:
        """Waits until workers have reported more blocks as removed than before."""
        async with asyncio.timeout(30):
            while self.num_removed == num_before:
                self._told.clear()
                await self._told.wait()
