"""Workers that are generated, beside a real router and broker: their sockets, subscriptions and messages are real, and
nothing else is.

Run: .venv/bin/python -m bench.router.generated_workers nats://127.0.0.1:4222 [--workers 2000] [--per-process 8]

A process has two connections for its workers, as a real one has, answers pings and sends its own, announces cards and
answers snapshots. It accepts every request: a token every 50 ms, each with its entry, chunk and seal, and the blocks of
the prompt, of which a worker keeps as many as its card says. It checks no guardians, and has no fence."""

import asyncio
import contextlib
import random
import re
import struct
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench import flags, system
from bench.checkouts import HERE
from tokenbus.cli.console import nats_server
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects

NAMES = subjects.Subjects()
MODEL = "generated"
_CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true,"lang":"bench"}\r\n'
_MESSAGE = re.compile(rb"(H?)MSG (\S+) \d+ (?:(\S+) )?(?:(\d+) )?(\d+)\r\n")
_BUSY_S = 0.2
"""Time between the entries of a worker that speaks for itself, and between a busy process's pings."""
_IDLE_PING_S = {True: 0.4, False: 0.25}
_BEAT_S = 0.8
_STEP_S = 0.05
_START_S = 6.0
"""Time in which all processes start, one after another."""
_SETTLE_S = 3.0
"""Time that a router then has to get to know the last ones."""
_BLOCK_TOKENS = 16
_BLOCKS = 1_024
_OTHERS = ("upload.*", "received.*", "gone.*", "unguarded.*", "kv.upload.*")
_runs = codec.Decoder(internal.Run)
_controls = codec.Decoder(internal.Control)


class Style(NamedTuple):
    """The ways of a version's workers."""

    beats: bool = True
    """Whether a process speaks for its idle workers with one beat every 800 ms; otherwise each worker publishes five
    entries a second."""


class _Stream:
    """A request that a worker has accepted."""

    def __init__(self, run: internal.Run, number: int) -> None:
        self.run = run
        self.number = number
        self.num_tokens = len(run.resume_from.token_ids) // 4 if run.resume_from else 0
        self.max_tokens = run.params.max_tokens or 16


class _Connection(asyncio.Protocol):
    """One connection of a process: it answers pings, and hands on messages."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._received = b""
        self.received_bytes = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(_CONNECT)

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        self._received += data
        at = 0
        while (end := self._received.find(b"\r\n", at)) >= 0:
            if found := _MESSAGE.match(self._received, at):
                payload_end = found.end() + int(found[5])
                if len(self._received) < payload_end + 2:
                    break
                payload = self._received[found.end() + int(found[4] or 0) if found[1] else found.end() : payload_end]
                self._process.received(found[2].decode(), (found[3] or b"").decode(), payload)
                at = payload_end + 2
                continue
            if self._received.startswith(b"PING", at):
                self.write(b"PONG\r\n")
            at = end + 2
        self._received = self._received[at:]


class _Worker:
    """One worker of a process."""

    def __init__(self, name: str, process: "Process") -> None:
        self.name = name
        self.seq = limits.FIRST_EVENT_SEQ - 1
        self.streams: dict[str, _Stream] = {}
        self._process = process
        self._blocks: deque[int] = deque()
        self._num_streams = 0
        self._is_stepping = False
        self.spoke_at = 0.0

    def load(self) -> messages.Load:
        cached = len(self._blocks)
        return messages.Load(running=len(self.streams), cached_blocks=cached, free_blocks=_BLOCKS - cached)

    def entry(self, **fields: object) -> bytes:
        """Returns the next entry of the event log as a command to the broker."""
        self.seq += 1
        self.spoke_at = time.monotonic()
        events = internal.Events(
            worker_id=self.name,
            epoch=self._process.epoch,
            seq=self.seq,
            load=self.load(),
            state=messages.WorkerState.READY,
            **fields,  # type: ignore[arg-type]
        )
        return _publish(NAMES.events(MODEL, self.name), codec.encode(events))

    def snapshot(self) -> internal.SnapshotPart:
        runs = [internal.BlockRun(parent=0, hashes=[one]) for one in self._blocks]
        running = [
            internal.RunningRequest(
                id=key,
                attempt=one.run.attempt,
                stream_no=one.number,
                num_tokens=one.num_tokens,
                router_id=one.run.router_id,
            )
            for key, one in self.streams.items()
        ]
        return internal.SnapshotPart(
            worker_id=self.name,
            epoch=self._process.epoch,
            seq=self.seq,
            part=0,
            parts=1,
            runs=runs,
            running=running,
            load=self.load(),
        )

    def accept(self, run: internal.Run) -> bytes:
        """Begins a stream; returns its first entry and its head chunk."""
        self._num_streams += 1
        stream = self.streams[run.request_id] = _Stream(run, self._num_streams)
        started = internal.Started(
            id=run.request_id,
            stream_no=stream.number,
            attempt=run.attempt,
            prompt_tokens=len(run.token_ids) // 4,
            router_id=run.router_id,
        )
        if not self._is_stepping:
            self._is_stepping = True
            asyncio.get_running_loop().call_later(_STEP_S, self._step)
        return self.entry(started=[started]) + self._chunk(stream, 0)

    def drop(self, key: str) -> internal.ControlReply:
        stream = self.streams.get(key)
        if stream is not None and stream.num_tokens:
            return internal.ControlReply(ok=False, error=errors.make_error(errors.Code.INTERNAL))
        self.streams.pop(key, None)
        return internal.ControlReply(ok=True, epoch=self._process.epoch)

    def _step(self) -> None:
        """Publishes a token of every stream, as one step."""
        firsts, removed, stored, ended, chunks = [], [], [], [], []
        streams = list(self.streams.values())
        numbers = struct.pack(f"<{len(streams)}I", *(one.number for one in streams))
        for stream in streams:
            if not stream.num_tokens:
                firsts.append(
                    internal.FirstToken(
                        stream_no=stream.number, cached_tokens=0, queue_ms=0.0, prefill_ms=1e3 * _STEP_S
                    )
                )
                hashes = [random.getrandbits(63) for _ in range(len(stream.run.token_ids) // (4 * _BLOCK_TOKENS))]
                stored.append(internal.BlockRun(parent=0, hashes=hashes))
                self._blocks += hashes
            stream.num_tokens += 1
            if stream.num_tokens >= stream.max_tokens:
                ended.append(stream.run.request_id)
            chunks.append(self._chunk(stream, 1))
        while len(self._blocks) > _BLOCKS:
            removed.append(self._blocks.popleft())
        for key in ended:
            del self.streams[key]
        tokens = struct.pack(f"<{len(streams)}I", *[7] * len(streams))
        entry = self.entry(stream_nos=numbers, token_ids=tokens, first_tokens=firsts, stored=stored, removed=removed)
        seal = codec.encode(internal.Seal(epoch=self._process.epoch, seq=self.seq))
        parts = [entry, *chunks, _publish(NAMES.seal(MODEL, self.name), seal)]
        if ended:
            parts.append(self.entry(finished=ended))
        self._process.write(b"".join(parts))
        self._is_stepping = bool(self.streams)
        if self._is_stepping:
            asyncio.get_running_loop().call_later(_STEP_S, self._step)

    def _chunk(self, stream: _Stream, tokens: int) -> bytes:
        run, is_last = stream.run, stream.num_tokens >= stream.max_tokens
        named = not tokens or is_last
        chunk = messages.Chunk(
            id=subjects.key_to_request_id(run.request_id),
            attempt=run.attempt,
            offset=stream.num_tokens - tokens,
            tokens=tokens,
            text_offset=5 * (stream.num_tokens - tokens),
            text="word " if tokens else "",
            finish_reason=messages.FinishReason.LENGTH if is_last else None,
            worker_id=self.name if named else msgspec.UNSET,
            model=MODEL if named else msgspec.UNSET,
            created=int(time.time()) if named else msgspec.UNSET,
        )
        gone = NAMES.gone(MODEL, self.name, f"{run.request_id}:{stream.num_tokens % subjects.NUM_MARKS}")
        return _publish(run.reply, codec.encode(chunk, run.encoding), gone)


class Process:
    """A worker process."""

    def __init__(self, name: str, workers: Sequence[str], style: Style) -> None:
        self.epoch = f"{time.time_ns() // 1_000_000}-{name}"
        self._name = name
        self._style = style
        self._workers = {one: _Worker(one, self) for one in workers}
        self._cards = b"".join(_publish(NAMES.card(MODEL, one), codec.encode(self._card(one))) for one in workers)
        self._outgoing, self._incoming = _Connection(self), _Connection(self)

    @property
    def received_bytes(self) -> int:
        return self._outgoing.received_bytes + self._incoming.received_bytes

    def write(self, data: bytes) -> None:
        self._outgoing.write(data)

    async def live(self, host: str, port: int, delay_s: float = 0.0) -> None:
        """Runs until cancelled."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(delay_s)
        try:
            for line in (self._outgoing, self._incoming):
                await loop.create_connection(lambda line=line: line, host, port)  # type: ignore[misc]
            heard = [one for worker in self._workers for one in subscriptions(worker)]
            self._incoming.write(b"".join(b"SUB %b %d\r\n" % (one.encode(), at) for at, one in enumerate(heard, 1)))
            await asyncio.sleep(0.2)
            self.write(self._cards)
            await self._speak()
        finally:
            for line in (self._outgoing, self._incoming):
                if line.transport is not None:
                    line.transport.abort()

    async def _speak(self) -> None:
        """Lets each worker be heard of in time."""
        beat_at = pinged_at = 0.0
        while True:
            now, out = time.monotonic(), []
            idle = [one for one in self._workers.values() if self._style.beats and not one.streams]
            ping_s = _IDLE_PING_S[self._style.beats] if len(idle) == len(self._workers) else _BUSY_S
            if now - pinged_at >= 0.9 * ping_s:
                pinged_at = now
                out.append(b"PING\r\n")
            # the first entry of a log, and those of workers with streams
            spoken_for = {one.name for one in idle if one.spoke_at}
            out += [
                one.entry()
                for one in self._workers.values()
                if one.name not in spoken_for and now - one.spoke_at >= 0.9 * _BUSY_S
            ]
            if spoken_for and now - beat_at >= 0.9 * _BEAT_S:
                beat_at = now
                seqs = {one.name: one.seq for one in idle}
                beat = internal.Beat(epoch=self.epoch, next_ms=1e3 * limits.BEAT_S, seqs=seqs)
                out.append(_publish(NAMES.beat(MODEL, self._name), codec.encode(beat)))
            self.write(b"".join(out))
            await asyncio.sleep(min(ping_s, _BUSY_S if len(idle) < len(self._workers) else ping_s))

    def received(self, subject: str, reply: str, payload: bytes) -> None:
        """Answers a message."""
        if subject == NAMES.discover:
            self.write(self._cards)
            return
        tokens = subject.split(".")
        if tokens[2] != "worker" or not reply:
            return
        worker, service = self._workers[tokens[4]], tokens[5]
        if service == "snapshot":
            self.write(_publish(reply, codec.encode(worker.snapshot())))
        elif service == "run":
            accept = _publish(reply, codec.encode(internal.RunReply(accepted=True)))
            self.write(accept + worker.accept(_runs.decode(payload)))
        elif service == "control":
            control = _controls.decode(payload)
            answer = worker.drop(control.request_id or "") if control.op == "drop" else internal.ControlReply(ok=True)
            self.write(_publish(reply, codec.encode(answer)))

    def _card(self, worker_id: str) -> messages.Card:
        return messages.Card(
            worker_id=worker_id,
            epoch=self.epoch,
            model=MODEL,
            source="generated",
            engine="sim",
            engine_version="1",
            context_length=4_096,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            hash_scheme="xxh3-64:0000000000000000",
            features=["generate", "token_ids", "explain", "resume"],
            state=messages.WorkerState.READY,
            host="generated",
            pids=messages.Pids(front=1, engine=2),
            versions={"tokenbus": "1", "python": "3.11", "nats-py": "2.11"},
            kv_block_size=_BLOCK_TOKENS,
            total_kv_blocks=_BLOCKS,
            takes_passed_on=True,
            process=self._name if self._style.beats else "",
        )


def subscriptions(worker: str) -> list[str]:
    """Returns the subjects that a worker hears."""
    own = [NAMES.worker(MODEL, worker, one) for one in ("*", *_OTHERS)]
    return [*own, NAMES.discover, NAMES.card(MODEL, worker)]


def processes(count: int, per_process: int, style: Style) -> list[Process]:
    """Returns processes with `count` workers in all."""
    names = [f"w{number:05}" for number in range(count)]
    starts = range(0, count, per_process)
    return [Process(f"p{at:05}", names[at : at + per_process], style) for at in starts]


async def live(fleet: Sequence[Process], url: str) -> None:
    """Runs processes until cancelled."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    delays = (_START_S * number / len(fleet) for number in range(len(fleet)))
    async with asyncio.TaskGroup() as group:
        for process, delay_s in zip(fleet, delays, strict=True):
            group.create_task(process.live(host, int(port), delay_s))


class GeneratedSystem(NamedTuple):
    """A real broker and router beside generated workers."""

    url: str
    broker_pid: int
    router_pid: int
    fleet: list[Process]
    router_log: Path

    @property
    def num_lost(self) -> int:
        """The number of times that the router has given a worker up."""
        return self.router_log.read_text().count('"worker_lost"')

    async def cores(self, seconds: float) -> "Cores":
        """Returns the cores that router and broker use in the next seconds."""
        pids = (self.router_pid, self.broker_pid)
        before, began = [system.cpu_seconds(pid) for pid in pids], time.perf_counter()
        await asyncio.sleep(seconds)
        took_s = time.perf_counter() - began
        return Cores(*((system.cpu_seconds(pid) - used) / took_s for pid, used in zip(pids, before, strict=True)))


class Cores(NamedTuple):
    """The CPU seconds a second of two processes."""

    router: float
    broker: float


@contextlib.asynccontextmanager
async def beside(fleet: list[Process], num_workers: int, checkout: Path = HERE) -> AsyncIterator[GeneratedSystem]:
    """Runs processes with `num_workers` workers beside a checkout's router, and waits until it has found them all."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as name:
        nats = await nats_server.start(0, Path(name) / "nats.log")
        log = Path(name) / "router.log"
        router = system.start(log, "router", "--nats", nats.url, python=checkout / ".venv/bin/python")
        living = asyncio.create_task(live(fleet, nats.url))
        try:
            async with asyncio.timeout(120):
                while log.read_text().count('"worker_state_changed"') < num_workers:
                    await asyncio.sleep(0.2)
            await asyncio.sleep(_SETTLE_S)
            yield GeneratedSystem(nats.url, nats.pid, router.pid, fleet, log)
        finally:
            living.cancel()
            await asyncio.wait([living])
            router.terminate()
            router.wait(timeout=60)
            nats.stop()


def _publish(subject: str, payload: bytes, reply: str = "") -> bytes:
    return b"PUB %b %b%d\r\n%b\r\n" % (subject.encode(), f"{reply} ".encode() if reply else b"", len(payload), payload)


def main() -> None:
    parser = flags.parser(__doc__, workers=2_000, per_process=8)
    parser.add_argument("url", help="the broker's")
    parser.add_argument("--entries", action="store_true", help="each worker speaks for itself, as in earlier versions")
    args = parser.parse_args()
    style = Style(not args.entries)
    asyncio.run(live(processes(args.workers, args.per_process, style), args.url))


if __name__ == "__main__":
    main()
