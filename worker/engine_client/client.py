"""The engine contract (worker/contract/contract.py) over a step loop in another process.

The client outlives its engines. Each is at the other end of a connection of its own: commands are written there, and
reports are read, both as ipc messages. `OpenSequences` owns what the engine works on, `StepWatchdog` decides whether a
step hangs, and `PendingCalls` waits for the replies to calls other than streams. When the engine dies, open streams
stay open: the next `start` continues them, or `fail_streams` ends them."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from tokenbus.protocol.averages import MovingAverage
from tokenbus.protocol.wire import block_hash, codec, errors, internal, messages
from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.contract import contract, engine_output, engine_request
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason
from tokenbus.worker.engine_client import admission, sequences
from tokenbus.worker.engine_client.engine_calls import EngineAdapters, PendingCalls, PoolingCalls
from tokenbus.worker.engine_client.engine_faults import CrashAttribution, StepWatchdog
from tokenbus.worker.engine_client.engine_process import EngineConnection, EngineDiedError, EngineLink
from tokenbus.worker.engine_client.generation import Generation
from tokenbus.worker.engine_client.listener import EngineListener
from tokenbus.worker.engine_client.reader import CompletionReader
from tokenbus.worker.files.device_memory import DeviceMemory

_STALL_S = 1.0
_MIN_TIMED_TOKENS = 32
"""The time of a step with fewer tokens is dominated by its fixed cost, and says little about the speed of prompts."""


class EngineClient:
    """An `Engine` whose process may be replaced: `start` connects to the first one, and to another after each death."""

    def __init__(
        self,
        launch: Callable[[], Awaitable[EngineLink]],
        max_waiting: int,
        listener: EngineListener | None = None,
    ) -> None:
        """`launch` starts the other side; up to `max_waiting` requests may be held beyond the running ones."""
        self._launch = launch
        self.listener = listener or EngineListener()
        self.capacity = admission.CapacityLimit(max_waiting)
        self._connection: EngineConnection | None = None
        """To the engine that starts or serves, or the last one that did."""
        self._absence = "there is no engine process"
        """Why there is none."""
        self._config: contract.EngineConfig | None = None
        """The configuration of the engine that serves, or of the last one that did; None while one starts."""
        self.token_bytes: list[bytes] = []
        self._bundle: bytes | None = None
        self._chat_rules: ChatRules | None = None
        self._sequences = sequences.OpenSequences(
            lambda number: self._send(ipc.Abort(number)), lambda *seen: self.listener.prompt_progress(*seen)
        )
        self._ending: set[Generation] = set()
        """Generations that are complete with their requests' resumed tokens, until their sinks are told."""
        self._tokenizing: PendingCalls[list[int]] = PendingCalls()
        self._pooling = PoolingCalls(self._send_if_alive, self._update_idle)
        self._adapters = EngineAdapters(self._send, lambda: self._sequences.held_adapters)
        self._exporting: PendingCalls[ipc.ExportedBlocks] = PendingCalls()
        self._prefill_tokens_per_s = MovingAverage(0.3)
        self._load = messages.Load()
        self.device_memory: list[DeviceMemory] = []
        """The memory of its devices other than the host, as last read."""
        self._watchdog = StepWatchdog(time.monotonic())
        self._idle = asyncio.Event()
        self._idle.set()
        self.idle_since: float | None = None
        """When the last request or call ended, or an idle engine was started; None while there are any."""
        self._log = structlog.get_logger()
        self.on_kv_events: Callable[[list[int], list[tuple[int, int]]], None] = lambda removed, stored: None
        """See the contract."""

    def __repr__(self) -> str:
        return f"<EngineClient {self._sequences!r}>"

    async def start(
        self, worker_id: str, prepare: Callable[["EngineClient"], Awaitable[None]] | None = None
    ) -> contract.EngineConfig:
        """Starts an engine, which continues the streams and calls that the last one left open. `prepare` makes it ready
        for these, and may raise the same errors.

        Raises ModelError if the model can't be loaded, EngineDiedError if the process died."""
        assert not self._is_alive, "there is an engine"
        await self.close()
        self._connection = self._config = None
        try:
            link = await self._launch()
        except EngineDiedError as error:
            self._absence = str(error)
            raise
        self._connection = EngineConnection(link, self._receive, self._engine_lost)
        ready = await self._connection.open()
        config = self._config = ready.config
        self.token_bytes, self._bundle = ready.token_bytes, ready.bundle
        self._chat_rules = ChatRules(config.chat_format, ready.token_bytes) if config.chat_format is not None else None
        self.listener.observe(ready.recovery)
        self._load, self.device_memory = messages.Load(free_blocks=config.total_kv_blocks), []
        self._watchdog = StepWatchdog(time.monotonic())
        if self._idle.is_set():
            self.idle_since = time.monotonic()
        self._log.info("engine_ready", worker_id=worker_id, pid=self._connection.link.pid, source=config.source)
        if prepare is not None:
            await prepare(self)
        if not self._is_alive:
            raise EngineDiedError("the engine process ended before it served")
        self.listener.engine_started(self, config)
        if ready.stored:
            self.on_kv_events([], ready.stored)
        # only now, so that outputs of these streams find the engine set
        self._continue()
        return config

    def generate(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> None:
        config = self._require_running()
        admission.check(request, config)
        self._adapters.check(request)
        self.capacity.check(len(self._sequences), config.max_num_seqs)
        reader = CompletionReader(request, self.token_bytes, self._chat_rules)
        generation = Generation(request, sink, reader, time.monotonic())
        generation.resume(config.end_token_ids)
        if generation.is_complete:
            self._end_soon(generation)
        else:
            self._open(generation, is_held=request.is_held)

    def release(self, key: str) -> None:
        if command := self._sequences.release_held(key):
            self._give(command)
            self._adapters.send_unloads()

    async def export_blocks(
        self, prefix: contract.CachedPrefix, first: int, max_blocks: int, *, is_last: bool = False
    ) -> tuple[int, list[bytes]]:
        self._require_running()
        found = await self._exporting.call(
            lambda call_id: self._send(ipc.ExportBlocks(call_id, prefix, first, max_blocks, is_last))
        )
        return found.num_cached, found.blocks

    def put_blocks(self, prefix: contract.CachedPrefix, first: int, blocks: list[bytes]) -> None:
        self._send_if_alive(ipc.PutBlocks(prefix, first, blocks))

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self._prefill_tokens_per_s.value

    def _continue(self) -> None:
        """Gives the engine what the last one left: its open streams, and the calls that may have killed it."""
        if self._pooling:
            self._expect_calls()
        self._pooling.engine_serves()
        generations = self._sequences.take_all()
        for generation in generations:
            if self._adapters.has_all(generation.request):
                self._open(generation)
            else:  # one was unloaded while the request used it, and this engine never had it
                generation.fail(errors.make_error(errors.Code.WORKER_LOST), time.monotonic())
        if generations:
            self._log.warning("streams_taken_over", count=len(generations))
            self._update_idle()

    def fail_streams(self) -> None:
        """Ends the streams and calls that were left open, since no engine continues them in time."""
        self._end_all(errors.Code.WORKER_LOST)
        self.listener.step_done()

    def abort(self, key: str) -> None:
        if generation := self._sequences.abort(key):
            generation.cancel(time.monotonic())
            self._adapters.send_unloads()
            self._update_idle()

    async def tokenize(self, request: internal.Tokenize) -> list[int]:
        self._require_running()
        return await self._tokenizing.call(lambda call_id: self._send(ipc.TokenizeCall(call_id, request)))

    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        if self._require_running().embeddings is None:
            raise errors.request_error(errors.Code.UNSUPPORTED, "this model makes no embeddings", param="model")
        self._expect_calls()
        result = await self._pooling.call(request)
        return internal.EmbedResult(vectors=result.rows, prompt_tokens=result.prompt_tokens)

    async def rerank(self, request: internal.Rerank) -> internal.RerankResult:
        if "rerank" not in self._require_running().features:
            raise errors.request_error(errors.Code.UNSUPPORTED, "this model scores no documents", param="model")
        self._expect_calls()
        result = await self._pooling.call(request)
        return internal.RerankResult(scores=result.rows, prompt_tokens=result.prompt_tokens)

    def _expect_calls(self) -> None:
        """Restarts an idle engine's step watchdog, since it is about to get calls."""
        if self._idle.is_set():
            self._watchdog.restart(time.monotonic())
        self._busy()

    async def load_adapter(self, path: str) -> str:
        self._require_running()
        return await self._adapters.load(path)

    def unload_adapter(self, digest: str) -> None:
        self._adapters.unload(digest)

    def read_memory(self) -> None:
        """Asks the engine to update `device_memory`."""
        self._send_if_alive(ipc.ReadMemory())

    def clear_cache(self) -> None:
        self._send_if_alive(ipc.ClearCache())

    def retain_session(self, tenant: str, session_id: str, ttl_s: float) -> None:
        self._send_if_alive(ipc.RetainSession(tenant, session_id, ttl_s))

    def expect_turn(self, turn: engine_request.ExpectedTurn) -> None:
        self._send_if_alive(ipc.ExpectTurn(self._sequences.next_number(), turn))

    def tokenizer_bundle(self) -> bytes | None:
        return self._bundle

    def load(self) -> messages.Load:
        if not self._sequences:
            return self._load
        # the engine's own counts are as old as its last report, and are about what it has started
        waiting = max(0, len(self._sequences) - self._load.running)
        queued = self._load.queued_prefill_tokens + self._sequences.queued_tokens
        expected = self._load.expected_blocks
        if self._config is not None:
            size = self._config.kv_block_size
            expected += self._sequences.expected_blocks(self._load.expected_answer_tokens, size)
        age_ms = self._watchdog.age_s(time.monotonic()) * 1e3 if self._sequences.num_computing else 0.0
        return codec.replace(
            self._load,
            waiting=waiting,
            queued_prefill_tokens=queued,
            expected_blocks=expected,
            step_age_ms=age_ms,
        )

    def check_step(self, now: float, gap_s: float, timeout_s: float) -> None:
        """Kills the engine if its step will never end; call it a few times a second, `gap_s` after the last call.

        A frontend that was frozen may have missed the engine's reports, so the step's age proves nothing."""
        if gap_s > _STALL_S:
            self._watchdog.restart(now)
        is_busy = self._sequences.num_computing or self._pooling.are_computing
        if self._connection is None or not is_busy or not self._is_alive or not self._watchdog.is_stuck(now, timeout_s):
            return
        longest_s = round(self._watchdog.longest_step_s, 3)
        self._log.error("step_stuck", age_s=round(self._watchdog.age_s(now), 1), longest_step_s=longest_s)
        self._watchdog.restart(now)  # the process takes a moment to end: report and kill it once
        self._connection.link.crash_attribution.step_stuck(self)
        self._connection.link.kill()

    async def died(self) -> str:
        assert self._connection is not None, "start comes first"
        # shielded, or a cancelled caller would cancel the future for all others
        return await asyncio.shield(self._connection.death)

    async def drain(self) -> None:
        await self._idle.wait()

    async def cleanup(self) -> None:
        self._end_all(errors.Code.SHUTTING_DOWN)
        self._nothing_follows()
        await self.close()

    async def close(self) -> str:
        """Ends the process but no stream, and returns how it ended. Safe to call again."""
        return self._absence if self._connection is None else await self._connection.close()

    @property
    def _is_alive(self) -> bool:
        return self._connection is not None and not self._connection.death.done()

    def _require_running(self) -> contract.EngineConfig:
        """Raises RequestError if the engine does not run."""
        if self._config is None or not self._is_alive:
            raise errors.request_error(errors.Code.NO_WORKER, "the engine is not running")
        return self._config

    def _open(self, generation: Generation, *, is_held: bool = False) -> None:
        """Opens a sequence that continues a generation, which may have tokens from a dead engine. The engine gets it
        now, or once it is released."""
        number = self._sequences.next_number()
        command = sequences.add_command(number, generation)  # may raise, so it comes before anything is opened
        self._sequences.add(number, generation, command if is_held else None)
        self._busy()
        if not is_held:
            self._give(command)

    def _give(self, command: bytes) -> None:
        """Gives the engine a sequence, which may be its only one."""
        if self._sequences.num_given == 1:
            self._watchdog.restart(time.monotonic())
        self._write(command)

    def _end_soon(self, generation: Generation) -> None:
        """Ends a generation that needs no engine in the next turn of the loop: `generate` returns before that."""
        self._ending.add(generation)
        self._busy()
        asyncio.get_running_loop().call_soon(self._end_resumed, generation)

    def _end_resumed(self, generation: Generation) -> None:
        self._ending.discard(generation)
        generation.end_resumed(time.monotonic())
        self._update_idle()
        self.listener.step_done()

    def _write(self, command: bytes) -> None:
        assert self._connection is not None, "start comes first"
        self._connection.write(command)

    def _send(self, command: ipc.Command) -> None:
        self._write(ipc.encode(command))

    def _send_if_alive(self, command: ipc.Command) -> None:
        if self._config is not None and self._is_alive:
            self._send(command)

    def _receive(self, report: ipc.Report) -> None:
        assert self._connection is not None
        attribution = self._connection.link.crash_attribution
        match report:
            case ipc.StepReport():
                self._take_step(report, attribution)
            case ipc.ConstraintStarted(number):
                self._watchdog.restart(time.monotonic())
                self._sequences.constraint_started(number)
            case ipc.ConstraintCompiled() as compiled:
                self._take_constraint(compiled)
            case ipc.TokenizeCallResult(call_id, token_ids, error):
                self._tokenizing.end(call_id, block_hash.unpack_token_ids(token_ids).tolist(), error)
            case ipc.AdapterResult() as loaded:
                self._adapters.loaded(loaded)
            case ipc.ExportedBlocks(call_id) as exported:
                self._exporting.end(call_id, exported)
            case ipc.MemoryRead(found):
                self.device_memory = found
            case ipc.BlocksRefused() as refused:
                self.listener.observe(refused)
            case ipc.PoolingBatch(call_ids):
                self._pooling.begin(call_ids)
                attribution.batch_changed(self, call_ids, on_probation=self._pooling.are_on_probation)
            case ipc.PoolResult() as result:
                self._pooling.ended(result)
            case ipc.StepIsolated(number):
                attribution.step_isolated(self, number)
            case ipc.MemoryPoisoned(numbers) as poisoned:
                attribution.memory_poisoned(self, numbers)
                self.listener.observe(poisoned)
            case ipc.Loading(fraction):
                self.listener.loading(fraction)

    def _take_constraint(self, compiled: ipc.ConstraintCompiled) -> None:
        now = time.monotonic()
        self._watchdog.restart(now)
        self.listener.observe(compiled)
        self._sequences.constraint_compiled(compiled, now)
        self._update_idle()
        self.listener.step_done()

    def _take_step(self, report: ipc.StepReport, attribution: CrashAttribution) -> None:
        now = time.monotonic()
        self._watchdog.step_reported(now, has_outputs=bool(report.outputs))
        num_computed = report.load.computed_tokens - self._load.computed_tokens
        self._load = report.load
        if report.stats is not None:
            if num_computed >= _MIN_TIMED_TOKENS and report.stats.seconds > 0:
                self._prefill_tokens_per_s.add(num_computed / report.stats.seconds)
            self.listener.observe(report.stats)
        if report.kv_pool is not None:
            self.listener.observe(report.kv_pool)
        if report.removed or report.stored:
            self.on_kv_events(report.removed, report.stored)
        if report.started or report.progress or report.scored:
            self._sequences.start(report.started, now)
            self._sequences.report_progress(report.progress)
            self._sequences.report_scored(report.scored)
        # before any sink runs: regardless of what a sink does, these survived the step
        attribution.step_succeeded(self, (output.seq_no for output in report.outputs))
        for output in report.outputs:
            if output.finish_reason is EngineFinishReason.CONSTRAINT_FAILED:
                self.listener.constraint_given_up()
        ended, seconds_to_count = self._sequences.advance(report.outputs, now)
        for generation in ended:
            if generation.is_complete:
                self.capacity.request_ended(now - generation.accepted_at)
        for seconds, count in seconds_to_count.items():
            self.listener.token_interval(seconds, count)
        self._update_idle()
        self.listener.step_done()

    def _busy(self) -> None:
        self._idle.clear()
        self.idle_since = None

    def _update_idle(self) -> None:
        if not self._idle.is_set() and not self._sequences and not self._pooling and not self._ending:
            self._idle.set()
            self.idle_since = time.monotonic()

    def _engine_lost(self) -> None:
        """Leaves the open streams for another engine, or for `fail_streams`."""
        assert self._connection is not None
        # first, so that routers know before any client is told
        self.listener.engine_died()
        self._connection.link.catch_up()  # a load may have begun
        attribution, is_computing = self._connection.link.crash_attribution, self._sequences.num_computing > 0
        may_be_unbegun = not is_computing and not attribution.may_be_a_load
        self._pooling.lose_engine(attribution.suspect_calls(self), may_be_unbegun=may_be_unbegun)
        for generation in self._sequences.lose_engine(attribution, self):
            self._log.error("request_crashes_engine", request_id=generation.request.key)
            generation.fail(errors.make_error(errors.Code.REQUEST_CRASHES_ENGINE), time.monotonic())
        self._nothing_follows()

    def _end_all(self, unstarted: errors.Code) -> None:
        """Ends every stream, with `unstarted` if no engine had started it, else with `worker_lost`, and every call for
        embeddings and scores."""
        now = time.monotonic()
        self._pooling.fail()
        for generation in self._sequences.take_all():
            code = unstarted if generation.started_at is None else errors.Code.WORKER_LOST
            generation.fail(errors.make_error(code), now)
        # the engine's memory goes with it, so every block counts as free
        known = self._load
        self._load = messages.Load(free_blocks=known.free_blocks + known.used_blocks + known.cached_blocks)
        self._update_idle()

    def _nothing_follows(self) -> None:
        """Fails the pending calls, and signals that sinks have received all that they will for now."""
        self._tokenizing.fail_all()
        self._exporting.fail_all()
        self._adapters.lose_engine()
        self._update_idle()
        self.listener.step_done()
