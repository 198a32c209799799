"""Clients as simulated processes, with a record of what they received: the library, and the simplest client."""

import asyncio
import contextlib
import json
import time

from nats.aio.msg import Msg

from tests.sim.engine import Token, check_completion, tokens_in
from tests.sim.heard import Heard, check_account
from tests.sim.network import Broker
from tests.sim.sim_bus import SimBus
from tests.sim.system import LIMITS, MODEL
from tests.sim.world import World
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.bus import bus
from tokenbus.protocol.wire import codec, errors, messages, subjects

_chunks = codec.Decoder(messages.Chunk)
_LENGTH = messages.FinishReason.LENGTH
_NAMES = subjects.Subjects()


class Listener:
    """A process under observation: everything that arrives on its reply subjects is checked."""

    def __init__(self, world: World, broker: Broker, name: str) -> None:
        self.name = name
        self.process = world.process(name)
        self.bus = SimBus(self.process, broker)
        self.heard: dict[str, Heard] = {}
        self.bus.tap = self._tap

    def _tap(self, message: Msg) -> None:
        if b'"attempt":' not in message.data:  # a reply, and no chunk
            return
        with contextlib.suppress(errors.RequestError):
            chunk = _chunks.decode(message.data, codec.Encoding.JSON)
            self.heard.setdefault(message.subject, Heard()).take(chunk)


class Asked:
    """One request of a client that uses the library, and every chunk that its reader received."""

    def __init__(self, stream: ChunkStream, max_tokens: int | None, seed: int | None, at: float) -> None:
        self.stream = stream
        # a stream that the library had to continue itself may go on at a worker with another limit
        self._lengths = range(min(LIMITS), max(LIMITS) + 1) if max_tokens is None else (max_tokens,)
        self.asked_at = at
        self.ended_at: float | None = None
        self.chunks: list[messages.Chunk] = []
        self._seed = seed
        self._first_id = stream.request_id
        self._num_checked = 0

    def __repr__(self) -> str:
        return f"<Asked {self.stream!r}: {self.text} {self.terminal and self.terminal.error}>"

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def terminal(self) -> messages.Chunk | None:
        return self.chunks[-1] if self.chunks and self.chunks[-1].finish_reason is not None else None

    @property
    def is_whole(self) -> bool:
        return self.terminal is not None and self.terminal.finish_reason is _LENGTH and not self.terminal.stopped_by

    def check(self) -> None:
        """Asserts that there is one text without a gap, and one terminal at its end."""
        if self._num_checked == len(self.chunks):
            return
        self._num_checked = len(self.chunks)
        tokens = tokens_in(self.text)
        check_completion(tokens, self._seed)
        assert all(chunk.finish_reason is None for chunk in self.chunks[:-1]), self
        assert not self.is_whole or len(tokens) in self._lengths, self
        if self.terminal is not None:
            check_account(self.terminal, tokens, knows_first=self.stream.request_id == self._first_id)


class ClientProcess(Listener):
    """A process that uses the library."""

    def __init__(self, world: World, broker: Broker, name: str) -> None:
        super().__init__(world, broker, name)
        self.client: WireClient = self.process.do(WireClient.from_connection(self.bus))
        self.asked: list[Asked] = []

    def ask(
        self,
        max_tokens: int | None,
        *,
        stream: bool = True,
        timeout_ms: float | None = None,
        prompt: str | None = None,
        begun: str | None = None,
        seed: int | None = None,
        session_id: str | None = None,
        worker_id: str = "",
        model: str = MODEL,
        resume: bool = True,
    ) -> None:
        """Sends a request with a text prompt, if there is one, or with the beginning of an answer, which is to be
        continued, or with token ids."""
        said = [messages.ChatMessage(role="assistant", content=begun)] if begun else None

        def go() -> None:
            request = messages.GenerateRequest(
                prompt=prompt,
                messages=said,
                continue_final_message=True if said else None,
                token_ids=None if prompt or said else [1, 2, 3],
                max_tokens=max_tokens,
                seed=seed,
                stream=stream,
                timeout_ms=timeout_ms,
                session_id=session_id,
                routing=messages.RoutingOptions(worker_id=worker_id) if worker_id else None,
            )
            one = Asked(self.client.generate(model, request, resume=resume), max_tokens, seed, time.monotonic())
            self.asked.append(one)
            self.process.spawn(_read(one))

        self.process.call(go)

    def embed(self, model: str = MODEL, request_id: str | None = None) -> "asyncio.Task[messages.EmbedReply]":
        """Requests the embedding of one text."""
        request = messages.EmbedRequest(id=request_id, input="x", timeout_ms=30_000.0)
        return self.process.spawn(self.client.embed(model, request))

    def tokenize(self, prompt: str) -> "asyncio.Task[messages.TokenizeReply]":
        """Requests the tokens of a text."""
        return self.process.spawn(self.client.tokenize(MODEL, messages.TokenizeRequest(prompt=prompt)))

    def detokenize(self, *token_ids: int) -> "asyncio.Task[messages.DetokenizeReply]":
        """Requests the text of tokens."""
        request = messages.DetokenizeRequest(token_ids=list(token_ids))
        return self.process.spawn(self.client.detokenize(MODEL, request))

    def rerank(self, model: str = MODEL, request_id: str | None = None) -> "asyncio.Task[messages.RerankReply]":
        """Asks for the order of two documents."""
        request = messages.RerankRequest(id=request_id, query="q", documents=["a", "b"], timeout_ms=30_000.0)
        return self.process.spawn(self.client.rerank(model, request))

    def cancel(self, number: int) -> None:
        if self.asked:
            self.process.call(self.asked[number % len(self.asked)].stream.cancel)

    def open(self) -> list[Asked]:
        return [one for one in self.asked if one.ended_at is None]


async def _read(one: Asked) -> None:
    async for chunk in one.stream:
        one.chunks.append(chunk)
    one.ended_at = time.monotonic()


class SimplyAsked:
    """One request of the simplest client: the texts of its messages, in the order of arrival."""

    def __init__(self, inbox: str, max_tokens: int | None, seed: int | None, patience_s: float) -> None:
        self.inbox = inbox
        self._lengths = LIMITS if max_tokens is None else (max_tokens,)
        self.patience_s = patience_s
        self.text = ""
        self.heard_at = time.monotonic()
        self.read_at: float | None = None
        """When text or the end came last."""
        self.longest_pause_s = 0.0
        """The longest time between two texts, or a text and the end."""
        self.ended = False
        self.terminal: messages.Chunk | None = None
        """The terminal; None if it has not come, or if the client gave up waiting for it."""
        self.may_have_hole = False
        """Whether messages may have been lost because a connection broke and was made again."""
        self._seed = seed

    def __repr__(self) -> str:
        return f"<SimplyAsked {self.text} {self.terminal}>"

    @property
    def tokens(self) -> list[Token]:
        return tokens_in(self.text)

    @property
    def is_whole(self) -> bool:
        return self.terminal is not None and self.terminal.finish_reason is _LENGTH and not self.terminal.stopped_by

    def check(self) -> None:
        """Asserts that the text has no hole and repeats nothing, and is whole unless an error or silence ended it."""
        if self.may_have_hole:
            return
        check_completion(self.tokens, self._seed)
        assert not self.is_whole or len(self.tokens) in self._lengths, self
        if self.terminal is not None:
            check_account(self.terminal, self.tokens, knows_first=True)


class SimpleClient(Listener):
    """A process that publishes requests in JSON, and concatenates the texts that come, up to a finish reason.

    It never looks at `attempt` or `offset`, and asks for nothing again. If nothing comes for a long time, it gives
    up."""

    def __init__(self, world: World, broker: Broker, name: str) -> None:
        super().__init__(world, broker, name)
        self.asked: list[SimplyAsked] = []

    def ask(
        self, max_tokens: int | None, *, stream: bool = True, seed: int | None = None, session_id: str | None = None
    ) -> None:
        def go() -> None:
            one = SimplyAsked(self.bus.new_inbox(), max_tokens, seed, patience_s=12.0 if stream else 60.0)
            self.asked.append(one)
            fields = {"max_tokens": max_tokens, "stream": stream, "seed": seed, "session_id": session_id}
            self.process.spawn(self._ask(one, fields))

        self.process.call(go)

    def open(self) -> list[SimplyAsked]:
        return [one for one in self.asked if not one.ended]

    async def _ask(self, one: SimplyAsked, fields: dict[str, int | str | None]) -> None:
        subscription = await self.bus.subscribe(one.inbox, lambda message: self._take(one, message))
        self.bus.publish(_NAMES.generate(MODEL), json.dumps(fields | {"token_ids": [1, 2, 3]}).encode(), one.inbox)
        while not one.ended:
            await asyncio.sleep(0.5)
            one.ended |= time.monotonic() - one.heard_at > one.patience_s
        await self.bus.unsubscribe(subscription)

    def _take(self, one: SimplyAsked, message: Msg) -> None:
        one.heard_at = time.monotonic()
        if one.ended:
            return
        if bus.is_no_responders(message):
            one.ended = True
            return
        fields = json.loads(message.data)
        one.text += fields["text"]
        if fields["text"] or fields["finish_reason"] is not None:
            if one.read_at is not None:
                one.longest_pause_s = max(one.longest_pause_s, one.heard_at - one.read_at)
            one.read_at = one.heard_at
        if fields["finish_reason"] is not None:
            one.ended = True
            one.terminal = _chunks.decode(message.data, codec.Encoding.JSON)
