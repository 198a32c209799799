"""Frontends, routers and clients as simulated processes, with a record of what the clients received."""

import asyncio
import contextlib
import itertools
import re
import time

from nats.aio.msg import Msg

from tests.sim.network import Broker, SimBus
from tests.sim.world import Process, World
from tokenbus.client import Client, Stream
from tokenbus.protocol.telemetry.tracing import NoopTracer
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects
from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.router.serve import Router
from tokenbus.router.settings import RouterSettings
from tokenbus.worker import contract
from tokenbus.worker.frontend.frontend import Frontend
from tokenbus.worker.frontend.metrics import ReplicaMetrics, WorkerMetrics
from tokenbus.worker.frontend.settings import FrontendSettings

MODEL = "sim"
_TOKEN = re.compile(r"<(\d+):(\d+)>")
_START_S = 0.3
_chunks = codec.Decoder(messages.Chunk)


class TimedEngine:
    """An engine that generates a token every `token_s`. Each token names its generation and its own number."""

    _serials = itertools.count(1)

    def __init__(self, max_num_seqs: int, token_s: float) -> None:
        self.config = contract.EngineConfig(
            engine="sim",
            engine_version="1",
            source="nothing",
            fingerprint="0",
            context_length=4_096,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            kv_block_size=16,
            total_kv_blocks=4_096,
            prefix_cache=False,
            vocab_size=1_000,
            features=("generate", "embed", "prompt", "token_ids"),
            defaults=SamplingParams(),
            versions={},
            pid=0,
        )
        self.token_bytes: list[bytes] = []
        self.on_kv_events = lambda removed, stored: None
        self._token_s = token_s
        self._open: dict[str, asyncio.TimerHandle] = {}
        self._sinks: dict[str, tuple[contract.EngineRequest, contract.Sink]] = {}
        self._made: dict[str, tuple[int, int]] = {}
        self.step_done = lambda: None

    async def start(self, worker_id: str) -> contract.EngineConfig:
        return self.config

    def generate(self, request: contract.EngineRequest, sink: contract.Sink) -> None:
        if len(self._sinks) > self.config.max_num_seqs:  # one may wait, as routers expect
            raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=100.0))
        self._sinks[request.key] = (request, sink)
        self._made[request.key] = (next(self._serials), 0)
        self._next(request.key)

    def abort(self, key: str) -> None:
        if key in self._sinks:
            self._end(key, messages.FinishReason.CANCELLED)

    def die(self) -> None:
        for key in list(self._sinks):
            self._end(key, messages.FinishReason.ERROR, errors.make_error(errors.Code.WORKER_LOST))

    async def tokenize(self, request: internal.Tokenize) -> list[int]:
        return [1, 2, 3]

    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        return internal.EmbedResult(vectors=bytes(8 * len(request.inputs)), prompt_tokens=1)

    def clear_cache(self) -> None:
        pass

    def tokenizer_bundle(self) -> bytes | None:
        return None

    def load(self) -> messages.Load:
        return messages.Load(running=len(self._sinks))

    async def died(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def drain(self) -> None:
        while self._sinks:
            await asyncio.sleep(0.05)

    async def cleanup(self) -> None:
        self.die()

    def _next(self, key: str) -> None:
        self._open[key] = asyncio.get_running_loop().call_later(self._token_s, self._step, key)

    def _step(self, key: str) -> None:
        request, sink = self._sinks[key]
        serial, made = self._made[key]
        self._made[key] = (serial, made + 1)
        text = f"<{serial}:{made}>"
        if made + 1 == request.sampling.max_tokens:
            self._end(key, messages.FinishReason.LENGTH, None, [made], text)
        else:
            sink(contract.Output(token_ids=[made], text=text))
            self._next(key)
        self.step_done()

    def _end(
        self,
        key: str,
        reason: messages.FinishReason,
        error: errors.Error | None = None,
        token_ids: list[int] | None = None,
        text: str = "",
    ) -> None:
        _, sink = self._sinks.pop(key)
        self._open.pop(key).cancel()
        _, made = self._made.pop(key)
        usage = messages.Usage(prompt_tokens=3, completion_tokens=made, total_tokens=3 + made, cached_tokens=0)
        timings = messages.Timings(queue_ms=0, prefill_ms=0, ttft_ms=0, decode_ms=0, total_ms=0)
        sink(
            contract.Output(
                token_ids=token_ids or [],
                text=text,
                finish_reason=reason,
                error=error,
                usage=usage,
                timings=timings,
            )
        )


class FrontendProcess:
    """A worker whose engine can die and is then restarted."""

    def __init__(
        self,
        world: World,
        broker: Broker,
        name: str,
        max_num_seqs: int = 4,
        token_s: float = 0.1,
        restart_s: float = _START_S,
    ) -> None:
        self._restart_s = restart_s
        self.name = name
        self.process = world.process(name)
        self.bus = SimBus(self.process, broker)
        self.incoming = SimBus(self.process, broker)
        self._shape = (max_num_seqs, token_s)
        self.engine: TimedEngine | None = None
        self.process.do(self._begin())
        self.process.spawn(self.frontend.run())

    async def _begin(self) -> None:
        settings = FrontendSettings(debug=True)
        metrics = ReplicaMetrics(WorkerMetrics(), MODEL, self.name)
        self.frontend = Frontend(self.bus, subjects.Subjects(), MODEL, self.name, settings, metrics, NoopTracer())
        await self.frontend.open(self.incoming)
        self._start_engine()

    def _start_engine(self) -> None:
        self.engine = TimedEngine(*self._shape)
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


class RouterProcess:
    def __init__(self, world: World, broker: Broker, name: str) -> None:
        self.name = name
        self.process = world.process(name)
        self.bus = SimBus(self.process, broker)
        self.process.spawn(self._live(world))

    async def _live(self, world: World) -> None:
        self.router = Router(self.bus, subjects.Subjects(), self.name, RouterSettings(), world.rng, NoopTracer())
        await self.router.open()
        await self.router.run()


class Asked:
    """One request of a client, and every chunk that its reader received."""

    def __init__(self, stream: Stream, max_tokens: int, at: float) -> None:
        self.stream = stream
        self.max_tokens = max_tokens
        self.asked_at = at
        self.ended_at: float | None = None
        self.chunks: list[messages.Chunk] = []

    def __repr__(self) -> str:
        return f"<Asked {self.stream!r}: {self.text}>"

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def terminal(self) -> messages.Chunk | None:
        return self.chunks[-1] if self.chunks and self.chunks[-1].finish_reason is not None else None

    def check(self) -> None:
        """Asserts that there is one text, of one generation, without a gap, with one terminal at its end."""
        token_bytes = _TOKEN.findall(self.text)
        assert "".join(f"<{serial}:{number}>" for serial, number in token_bytes) == self.text, self
        assert len({serial for serial, _ in token_bytes}) <= 1, self
        assert [int(number) for _, number in token_bytes] == list(range(len(token_bytes))), self
        assert all(chunk.finish_reason is None for chunk in self.chunks[:-1]), self
        terminal = self.terminal
        if terminal is not None and terminal.finish_reason is messages.FinishReason.LENGTH:
            assert len(token_bytes) == self.max_tokens, self


class Heard:
    """One reply subject as the simplest client sees it that follows docs/wire.md: it ignores lower attempts, and stops
    at the first terminal."""

    def __init__(self) -> None:
        self.attempt = 0
        self.serials: set[str] = set()
        self.ends: list[tuple[str, int, str | None]] = []
        self.strays = 0
        """A router's keepalives after the terminal, where only chunks that a resync repeats may come."""

    def take(self, chunk: messages.Chunk) -> None:
        if self.ends and chunk.finish_reason is None and chunk.worker_id is None and not chunk.tokens:
            self.strays += 1
        if chunk.finish_reason is not None:
            self.ends.append((chunk.finish_reason, chunk.attempt, chunk.worker_id or None))
        if chunk.attempt >= self.attempt and len(self.ends) <= (chunk.finish_reason is not None):
            self.attempt = chunk.attempt
            self.serials |= {serial for serial, _ in _TOKEN.findall(chunk.text)}

    def check(self) -> None:
        """Asserts that there is one text and one end, however often it is repeated, with no keepalive after it."""
        assert self.strays == 0, self.ends
        assert len(self.serials) <= 1, self.serials
        assert len(set(self.ends)) <= 1, self.ends


class ClientProcess:
    def __init__(self, world: World, broker: Broker, name: str) -> None:
        self.name = name
        self.process = world.process(name)
        self.bus = SimBus(self.process, broker)
        self.heard: dict[str, Heard] = {}
        self.bus.tap = self._tap
        self.client: Client = self.process.do(Client.from_connection(self.bus))
        self.asked: list[Asked] = []

    def _tap(self, message: Msg) -> None:
        with contextlib.suppress(errors.RequestError):
            chunk = _chunks.decode(message.data, codec.Encoding.JSON)
            self.heard.setdefault(message.subject, Heard()).take(chunk)

    def ask(
        self,
        max_tokens: int,
        *,
        stream: bool = True,
        timeout_ms: float | None = None,
        prompt: str | None = None,
        worker_id: str = "",
        model: str = MODEL,
    ) -> None:
        """Sends a request with a text prompt, if there is one, or with token ids."""

        def go() -> None:
            request = messages.GenerateRequest(
                prompt=prompt,
                token_ids=None if prompt else [1, 2, 3],
                max_tokens=max_tokens,
                stream=stream,
                timeout_ms=timeout_ms,
                routing=messages.RoutingOptions(worker_id=worker_id) if worker_id else None,
            )
            one = Asked(self.client.generate(model, request), max_tokens, time.monotonic())
            self.asked.append(one)
            self.process.spawn(_read(one))

        self.process.call(go)

    def embed(self, model: str = MODEL) -> "asyncio.Task[messages.EmbedReply]":
        """Requests the embedding of one text."""
        request = messages.EmbedRequest(input="x", timeout_ms=30_000.0)
        return self.process.spawn(self.client.embed(model, request))

    def cancel(self, number: int) -> None:
        if self.asked:
            self.process.call(self.asked[number % len(self.asked)].stream.cancel)

    def open(self) -> list[Asked]:
        return [one for one in self.asked if one.ended_at is None]


async def _read(one: Asked) -> None:
    async for chunk in one.stream:
        one.chunks.append(chunk)
    one.ended_at = time.monotonic()


def kill(process: Process, *buses: SimBus) -> None:
    """Kills a process and its connections, like kill -9."""
    process.kill()
    for bus in buses:
        with contextlib.suppress(ValueError):
            bus.kill()
