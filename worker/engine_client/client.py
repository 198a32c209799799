"""The engine as its frontend sees it: the contract (worker/contract.py) over a step loop in another process."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog

from tokenbus.protocol.wire import block_hash, codec, errors, internal, messages
from tokenbus.worker import contract
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason
from tokenbus.worker.engine_client import admission
from tokenbus.worker.engine_client.admission import CapacityLimit
from tokenbus.worker.engine_client.crash_attribution import CrashAttribution
from tokenbus.worker.engine_client.engine_process import EngineDiedError, Link
from tokenbus.worker.engine_client.pending_calls import PendingCalls
from tokenbus.worker.streams.generation import Generation

_CLOSE_TIMEOUT_S = 5.0
_MAX_CRASHES = 2
_MAX_EMBEDS = 64
"""Requests for embeddings that may be here at a time."""
_STUCK_FACTOR = 10
"""A step this many times as long as the longest seen is one that never ends."""


class EngineClient:
    """An `Engine` over a step loop at the other end of a socket. `launch` starts it."""

    def __init__(self, launch: Callable[[], Awaitable[Link]], max_waiting: int) -> None:
        self._launch = launch
        self.capacity = CapacityLimit(max_waiting)
        self._link: Link | None = None
        self._transport: asyncio.Transport | None = None
        self._config: contract.EngineConfig | None = None
        self._token_bytes: list[bytes] = []
        self._bundle: bytes | None = None
        self._generations: dict[int, Generation] = {}
        self._numbers: dict[str, int] = {}
        self._releasing: set[int] = set()
        self._begun_numbers: set[int] = set()
        """Those of the open ones that this engine has begun to compute: it may have died of them."""
        self._tokenizing: PendingCalls[list[int]] = PendingCalls()
        self._embedding: PendingCalls[internal.EmbedResult] = PendingCalls()
        self._last_number = 0
        self._load = messages.Load()
        self._stepped_at = time.monotonic()
        self._longest_step_s = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._ready: asyncio.Future[ipc.Ready] | None = None
        self._death: asyncio.Future[str] | None = None
        self._log = structlog.get_logger()
        self.on_loading: Callable[[float], None] = lambda fraction: None
        """Told how much of the model is loaded, from 0 to 1."""
        self.on_disconnect: Callable[[], None] = lambda: None
        """Called when the other side is gone, before any stream is told so."""
        self.on_kv_events: Callable[[list[int], list[tuple[int, int]]], None] = lambda removed, stored: None
        """As the contract says."""
        self.on_step_stats: Callable[[ipc.StepStats], None] = lambda stats: None
        """Told how each step went that computed something."""
        self.on_token_interval: Callable[[float, int], None] = lambda seconds, count: None
        """Told the time from a token of a request to its next, and of how many requests."""
        self.on_step: Callable[[], None] = lambda: None
        """Called when all sinks have had what a step brought."""

    def __repr__(self) -> str:
        return f"<EngineClient {len(self._generations)} open, {len(self._releasing)} releasing>"

    @property
    def token_bytes(self) -> list[bytes]:
        return self._token_bytes

    async def start(self, worker_id: str) -> contract.EngineConfig:
        """Raises EngineStartError for a model that can't be loaded, EngineDiedError when the process died."""
        assert self._link is None, "an engine is started once"
        loop = asyncio.get_running_loop()
        self._ready, self._death = loop.create_future(), loop.create_future()
        self._link = await self._launch()
        transport, _ = await loop.create_connection(
            lambda: _Receiver(self._receive, self._disconnected), sock=self._link.sock
        )
        self._transport = transport
        ready = await self._ready
        self._token_bytes, self._bundle, self._config = ready.token_bytes, ready.bundle, ready.config
        self._load = messages.Load(free_blocks=ready.config.total_kv_blocks)
        self._log.info("engine_ready", worker_id=worker_id, pid=self._link.pid, source=ready.config.source)
        return ready.config

    def generate(self, request: contract.EngineRequest, sink: contract.Sink) -> None:
        self._check(request)
        assert request.key not in self._numbers, request.key
        self._add_stream(Generation(request, sink, self._token_bytes, time.monotonic()))

    def take_over(self, dead: "EngineClient") -> None:
        """Goes on with the streams that another engine has left open."""
        generations, dead._generations = list(dead._generations.values()), {}
        dead._numbers.clear()
        dead._begun_numbers.clear()
        dead._update_idle()
        for generation in generations:
            self._add_stream(generation)
        if generations:
            self._log.warning("streams_taken_over", count=len(generations))

    def fail_streams(self) -> None:
        """Ends the streams that were left open, since nobody takes them over."""
        self._end_all(errors.Code.WORKER_LOST)

    def abort(self, key: str) -> None:
        number = self._numbers.get(key)
        if number is not None and not self._generations[number].has_ended:  # else its sink is being told so just now
            self._abort_sequence(number)
            self._generations[number].cancel(time.monotonic())
            self._remove(number)

    async def tokenize(self, request: internal.Tokenize) -> list[int]:
        self._running()
        return await self._tokenizing.call(lambda call_id: self._send(ipc.TokenizeCall(call_id, request)))

    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        if not self._running().embedding_width:
            raise errors.request_error(errors.Code.UNSUPPORTED, "this model makes no embeddings", param="model")
        if len(self._embedding) >= _MAX_EMBEDS:
            raise errors.request_error(errors.Code.OVERLOADED)
        if self._idle.is_set():
            self._stepped_at = time.monotonic()
        self._idle.clear()
        try:
            reply = await self._embedding.call(lambda call_id: self._send(ipc.EmbedCall(call_id, request)))
        finally:
            self._update_idle()
        if reply.error is not None:
            raise errors.RequestError(reply.error)
        return reply

    def clear_cache(self) -> None:
        if self._config is not None and not self._died:
            self._send(ipc.ClearCache())

    def tokenizer_bundle(self) -> bytes | None:
        return self._bundle

    def load(self) -> messages.Load:
        if not self._generations and not self._releasing:
            return self._load
        age_ms = (time.monotonic() - self._stepped_at) * 1e3
        waiting = max(0, len(self._generations) + len(self._releasing) - self._load.running)
        return codec.replace(self._load, waiting=waiting, step_age_ms=age_ms)

    def kill_if_stuck(self, now: float, timeout_s: float) -> None:
        """Ends the engine if it has work and its step is older than `timeout_s`, and than ten of the longest so far."""
        age_s = now - self._stepped_at
        is_busy = bool(self._generations or self._releasing or self._embedding)
        if is_busy and not self._died and age_s > max(timeout_s, _STUCK_FACTOR * self._longest_step_s):
            self._log.error("step_stuck", age_s=round(age_s, 1), longest_step_s=round(self._longest_step_s, 3))
            assert self._link is not None
            self._stepped_at = now
            self._crash_attribution.step_stuck(self)
            self._link.kill()

    def restart_step_timer(self, now: float) -> None:
        """The frontend itself stood still: the age of the step says nothing."""
        self._stepped_at = now

    async def died(self) -> str:
        assert self._death is not None, "start comes first"
        return await asyncio.shield(self._death)

    async def drain(self) -> None:
        await self._idle.wait()

    async def cleanup(self) -> None:
        self._end_all(errors.Code.SHUTTING_DOWN)
        await self.close()

    async def close(self) -> str:
        """Ends the process, and no stream; returns how it ended. Safe to call again."""
        if self._transport is not None:
            self._transport.close()
        if self._link is None:
            return "there is no engine process"
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                return await self._link.wait()
        except TimeoutError:
            self._link.kill()
            return "the engine process did not end, and was killed"

    @property
    def has_died(self) -> bool:
        """Whether it served once and does so no more."""
        return self._config is not None and self._died

    @property
    def _crash_attribution(self) -> CrashAttribution:
        assert self._link is not None
        return self._link.crash_attribution

    @property
    def _died(self) -> bool:
        return self._death is None or self._death.done()

    def _check(self, request: contract.EngineRequest) -> None:
        """Raises RequestError when the request can't be accepted."""
        config = self._running()
        admission.check(request, config)
        self.capacity.check(len(self._generations) + len(self._releasing), config.max_num_seqs)

    def _running(self) -> contract.EngineConfig:
        """Raises RequestError where the engine does not run."""
        if self._config is None or self._died:
            raise errors.request_error(errors.Code.NO_WORKER, "the engine is not running")
        return self._config

    def _add_stream(self, generation: Generation) -> None:
        self._last_number += 1
        number = self._last_number
        added = ipc.encode(_add(number, generation))
        self._generations[number] = generation
        self._numbers[generation.request.key] = number
        self._idle.clear()
        if len(self._generations) + len(self._releasing) == 1:
            self._stepped_at = time.monotonic()
        assert self._transport is not None
        self._transport.write(added)

    def _send(self, command: ipc.Command) -> None:
        assert self._transport is not None
        self._transport.write(ipc.encode(command))

    def _receive(self, body: bytes) -> None:
        match ipc.report_decoder.decode(body):
            case ipc.StepReport() as report:
                self._take_step(report)
            case ipc.TokenizeResult(call_id, _, errors.Error() as error):
                self._tokenizing.reject(call_id, error)
            case ipc.TokenizeResult(call_id, token_ids):
                self._tokenizing.resolve(call_id, block_hash.unpack_token_ids(token_ids))
            case ipc.EmbedResult(call_id, reply):
                self._embedding.resolve(call_id, reply)
            case ipc.StepIsolated(number):
                self._crash_attribution.step_isolated(self, number)
            case ipc.Loading(fraction):
                self.on_loading(fraction)
            case ipc.Ready() as ready:
                assert self._ready is not None
                self._ready.set_result(ready)
            case ipc.LoadFailed(message):
                assert self._ready is not None
                self._ready.set_exception(contract.EngineStartError(message))

    def _take_step(self, report: ipc.StepReport) -> None:
        now = time.monotonic()
        if report.outputs:
            self._longest_step_s = max(self._longest_step_s, now - self._stepped_at)
        self._stepped_at = now
        self._load = report.load
        if report.stats is not None:
            self.on_step_stats(report.stats)
        if report.removed or report.stored:
            self.on_kv_events(report.removed, report.stored)
        for number in report.started:
            if generation := self._generations.get(number):
                self._begun_numbers.add(number)
                generation.begin(now)
        for seen in report.progress:
            if generation := self._generations.get(seen.seq_no):
                self._progress(seen, generation)
        lasts: Counter[float] = Counter()
        for output in report.outputs:
            self._crash_attribution.step_succeeded(self, output.seq_no)
            if output.finish_reason is not None:
                self._releasing.discard(output.seq_no)
            if generation := self._generations.get(output.seq_no):
                if generation.last_token_at is not None and output.token_id is not None:
                    lasts[generation.last_token_at] += 1
                self._advance(output, generation, now)
        for last, count in lasts.items():  # those that step together had their last one together: mostly one of them
            self.on_token_interval(now - last, count)
        self._update_idle()
        self.on_step()

    def _progress(self, seen: ipc.PromptProgress, generation: Generation) -> None:
        is_over = generation.progress(seen.computed_tokens, seen.cached_tokens)
        if is_over and seen.seq_no in self._generations:
            self._abort_sequence(seen.seq_no)
            self._remove(seen.seq_no)

    def _advance(self, output: ipc.SequenceOutput, generation: Generation, now: float) -> None:
        if not generation.advance(output, now):
            return
        if output.seq_no not in self._generations:  # its own sink has aborted it
            return
        if output.finish_reason is None:
            self._abort_sequence(output.seq_no)
        if generation.finished_by in (EngineFinishReason.STOP_TOKEN, EngineFinishReason.LENGTH):
            self.capacity.request_ended(now - generation.accepted_at)
        self._remove(output.seq_no)

    def _abort_sequence(self, number: int) -> None:
        """Has the engine give up a sequence whose stream has ended; it counts as held until that is done."""
        if not self._died:
            self._releasing.add(number)
            self._send(ipc.Abort(number))

    def _remove(self, number: int) -> None:
        del self._numbers[self._generations.pop(number).request.key]
        self._begun_numbers.discard(number)
        self._update_idle()

    def _update_idle(self) -> None:
        if not self._generations and not self._releasing and not self._embedding:
            self._idle.set()

    def _disconnected(self) -> None:
        """The other side is gone: its open streams are left for another engine, or for `fail_streams`."""
        assert self._death is not None
        assert self._ready is not None
        self.on_disconnect()
        if not self._ready.done():
            self._ready.set_exception(EngineDiedError("the engine process ended while it was starting"))
        if not self._death.done():
            self._death.set_result("the engine process closed its socket")
        self._leave_streams()

    def _leave_streams(self) -> None:
        """Leaves the open streams for another engine, but those that have ended two.

        Where it had begun with none of them it died of one that nobody has begun with."""
        now = time.monotonic()
        self._releasing.clear()
        new = {number for number, generation in self._generations.items() if generation.started_at is None}
        suspects = set(self._begun_numbers) or new
        for number, generation in list(self._generations.items()):
            generation.crashes += number in suspects and self._crash_attribution.may_be_caused_by(self, number)
            if generation.crashes >= _MAX_CRASHES:
                self._log.error("request_crashes_engine", request_id=generation.request.key)
                generation.fail(errors.Code.REQUEST_CRASHES_ENGINE, now)
                self._remove(number)
        self._tokenizing.fail_all()
        self._embedding.fail_all()
        self._update_idle()
        self.on_step()

    def _end_all(self, unstarted: errors.Code) -> None:
        """Ends every stream: `unstarted` is said of those that had not begun, the others have lost their worker."""
        now = time.monotonic()
        for number, generation in list(self._generations.items()):
            generation.fail(unstarted if generation.started_at is None else errors.Code.WORKER_LOST, now)
            self._remove(number)
        self._releasing.clear()
        known = self._load
        self._load = messages.Load(free_blocks=known.free_blocks + known.used_blocks + known.cached_blocks)
        self._tokenizing.fail_all()
        self._embedding.fail_all()
        self._update_idle()
        self.on_step()


def _add(number: int, generation: Generation) -> ipc.Add:
    request = generation.request
    return ipc.Add(
        number,
        block_hash.pack_token_ids(request.token_ids) + block_hash.pack_token_ids(generation.sampled),
        request.sampling,
        (request.tenant, request.cache_salt) if request.cache_prompt else None,
        request.priority,
        request.return_progress,
        num_sampled=len(generation.sampled),
        isolated=generation.crashes > 0,
    )


class _Receiver(asyncio.Protocol):
    def __init__(self, receive: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._frame_decoder = ipc.FrameDecoder()
        self._receive_frame = receive
        self._disconnected = lost

    def data_received(self, data: bytes) -> None:
        for body in self._frame_decoder.feed(data):
            self._receive_frame(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disconnected()
