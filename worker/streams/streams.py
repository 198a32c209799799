"""The streams of one worker: accepts runs; cancels, drops, gives up and replays streams; forgets those that have ended.

A stream is *open* from its accept until its terminal. Afterwards it is *ended*: it stays for a minute, so that its
client can ask for lost chunks. A router that gave up on this worker *drops* a stream and places the request elsewhere;
once its first token is sent, that is allowed only if another worker already continues it. When this worker leaves,
routers *take* the streams that they guard."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from tokenbus.protocol.bus.bus import lease_time
from tokenbus.protocol.telemetry import long_waits, tracing
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import block_hash, codec, errors, internal, limits, messages, subjects
from tokenbus.worker.adapters.adapters import Adapters
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.replica_state import ReplicaState, Serving
from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.contract import contract, engine_output
from tokenbus.worker.contract.contract import StreamValidator
from tokenbus.worker.kv_exchange.exchange import KvExchange
from tokenbus.worker.kv_exchange.fetcher import Fetch
from tokenbus.worker.settings.settings import FrontendSettings
from tokenbus.worker.streams.early_cancels import EarlyCancels
from tokenbus.worker.streams.held_streams import HeldStreams
from tokenbus.worker.streams.next_turns import EndedTurns
from tokenbus.worker.streams.outbox import Outbox
from tokenbus.worker.streams.request_telemetry import StreamTelemetry
from tokenbus.worker.streams.router_reach import RouterReach
from tokenbus.worker.streams.run_request import sampling_report, to_engine_request
from tokenbus.worker.streams.stranded import StrandedStreams
from tokenbus.worker.streams.stream import WorkerStream

_GROWTH = 5  # bytes of memory for each byte of a message that is full of log probabilities
_MAX_TAKEN_BYTES = 32 * 1024 * 1024


class Streams:
    """The open and the ended streams of one worker, by request key."""

    def __init__(
        self,
        announcer: Announcer,
        outbox: Outbox,
        telemetry: StreamTelemetry,
        settings: FrontendSettings,
        exchange: KvExchange,
        adapters: Adapters | None = None,
        reach: RouterReach | None = None,
    ) -> None:
        self._announcer = announcer
        self._outbox = outbox
        self._telemetry = telemetry
        self.settings = settings
        self._adapters = Adapters() if adapters is None else adapters
        self._exchange = exchange
        self._chat: ChatRules | None = None
        self._streams: dict[str, WorkerStream] = {}
        self._reach = RouterReach(lambda: "") if reach is None else reach
        self.next_turns = EndedTurns(announcer, self._adapters)
        self.held = HeldStreams(self, outbox, self._reach, telemetry, settings)
        self._ended: TTLCache[WorkerStream] = TTLCache(limits.ENDED_STREAM_TTL_S, limits.MAX_ENDED_STREAM_BYTES)
        self._taken: TTLCache[internal.TakeReply] = TTLCache(limits.ENDED_STREAM_TTL_S, _MAX_TAKEN_BYTES)
        """The replies to `take`, by request key, attempt and router."""
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._early_cancels = EarlyCancels()
        self._stream_nos = itertools.count()
        self._stranded = StrandedStreams(announcer, outbox)
        self.ended_guardians: dict[str, float] = {}
        """The guardians of streams that ended in the last minute, and the time of the last such end; an empty name
        stands for none."""
        self.on_accepted: Callable[[internal.Run], None] = lambda run: None
        """Called with each run that was accepted."""
        announcer.has_streams = lambda: bool(self._streams)
        outbox.on_ended = self._close

    def __repr__(self) -> str:
        return f"<Streams {len(self._streams)} open, {len(self._ended)} ended, {self.held!r}>"

    def engine_started(self, serving: Serving) -> None:
        """Prepares for requests to a new engine, which also continues open streams, if it has their adapters."""
        engine, config = serving
        for stream in self._streams.values():
            stream.is_stranded = stream.is_stranded or not self._adapters.has_all(stream.run)
        self._chat = None if config.chat_format is None else ChatRules(config.chat_format, engine.token_bytes)

    @property
    def _engine(self) -> contract.Engine | None:
        """The engine that has the open streams. If it has died, it still ends those that are to end."""
        last = self._announcer.last_served
        return last.engine if last is not None else None

    def accept(self, run: internal.Run, headers: tracing.Headers = None) -> internal.RunReply:
        """Starts a stream, or refuses the run; then at most an earlier attempt is gone. `headers` name its trace."""
        try:
            self._start(run, headers)
        except errors.RequestError as refusal:
            live = self._streams.get(run.request_id)
            self._telemetry.refused(refusal.error.code)
            return internal.RunReply(
                accepted=False,
                error=refusal.error,
                same_reply=live is not None and live.run.reply == run.reply,
                cancelled=self._early_cancels.is_cancelled(run, time.monotonic()),
            )
        self.on_accepted(run)
        return internal.RunReply(accepted=True)

    def cancel(self, key: str, because: errors.Error | None = None) -> bool:
        """Ends a stream with `cancelled`, or with the error `because`; returns False if no open stream has this key."""
        stream = self._streams.get(key)
        if stream is None or self._engine is None:
            now = time.monotonic()
            # a cancel that comes too late has no effect; one that comes too early is remembered
            if self._ended.get(key, now) is None:
                self._early_cancels.cancel(key, now)
            return False
        stream.cancel_error = because
        self._end_early(stream)
        return True

    def stop(self, key: str, by: messages.StoppedBy) -> bool:
        """Ends a stream with what was generated so far; returns False if no stream with this key is still open."""
        stream = self._streams.get(key)
        if stream is None or stream.terminal is not None or self._engine is None:
            return False
        stream.stopped_by = by
        self._end_early(stream)
        return True

    def stop_begun(self, *, unguarded_only: bool) -> None:
        """Ends the streams that have a token with what was generated, because this worker is stopping. Guarded streams
        may be left out: their clients may continue them after `worker_lost`."""
        for stream in list(self._streams.values()):
            if stream.num_tokens and not (unguarded_only and stream.guardian):
                self.stop(stream.key, messages.StoppedBy.SHUTDOWN)

    def drop(self, key: str, attempt: int, *, moved: bool = False) -> bool:
        """Ends an attempt and all earlier ones without a terminal.

        Returns False if the attempt has sent a token or has ended, unless another worker continues it (`moved`)."""
        now, stream = time.monotonic(), self._streams.get(key)
        if stream is None:
            ended = self._ended.get(key, now)
            # the client has its terminal: the router must not place the request again
            if ended is not None and ended.run.attempt == attempt and not moved:
                return False
            # the worker that continues it also replays it
            if moved and ended is not None and ended.run.attempt <= attempt:
                self._ended.pop(key)
            self._early_cancels.drop(key, attempt, now)
            return True
        if stream.run.attempt > attempt:  # the dropped one is over in any case
            return True
        if stream.run.attempt < attempt:  # the router that drops a later attempt has given this one up
            self._early_cancels.drop(key, attempt, now)
            moved = True
        if (stream.first_token_sent or stream.terminal is not None) and not moved:
            return False
        self.abandon(stream, "moved" if moved else "dropped")
        # a router that has moved it, and waits for another worker, must not think that it has ended here
        (self._announcer.log.taken if moved else self._announcer.log.finished).append(key)
        self._announcer.publish_events()  # before the reply: later, it could be mistaken for the end of a later attempt
        return True

    def take(self, take: internal.Take) -> internal.TakeReply | None:
        """Gives up a stream to the router that asks for it, which continues it elsewhere. If asked again, returns the
        same reply.

        Returns None, and changes nothing, while anything waits for the broker."""
        now, epoch = time.monotonic(), self._announcer.epoch
        name = f"{take.request_id} {take.attempt} {take.router_id}"
        if (taken := self._taken.get(name, now)) is not None:
            return taken
        if not self._outbox.flush():
            return None
        stream = self._streams.get(take.request_id)
        is_leaving = self._announcer.state is ReplicaState.LEAVING
        if stream is None or stream.run.attempt != take.attempt or not (is_leaving or stream.is_stranded):
            return internal.TakeReply(ok=False, epoch=epoch)
        if stream.guardian and stream.guardian != take.router_id:  # otherwise both would continue it
            return internal.TakeReply(ok=False, epoch=epoch)
        reply = internal.TakeReply(ok=True, epoch=epoch, **msgspec.structs.asdict(stream.state(take.known_tokens)))
        if len(reply.token_ids) + len(reply.logprobs) > _MAX_TAKEN_BYTES:
            return internal.TakeReply(ok=False, epoch=epoch)
        self.abandon(stream, "taken")
        size = len(name) + len(reply.token_ids) + len(reply.logprobs) + 512
        if is_leaving and stream.last_words is not None:
            room_bytes = self._outbox.room_bytes
            reply = codec.replace(reply, last_words=stream.say_last_words(stream.last_words, room_bytes))
            size += _GROWTH * len(codec.encode(reply))
        self._taken.put(name, reply, now, min(size, _MAX_TAKEN_BYTES))
        self._announcer.log.taken.append(stream.key)
        self._announcer.publish_events()
        return reply

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[WorkerStream]:
        """Yields the open streams."""
        return iter(self._streams.values())

    def find(self, key: str) -> WorkerStream | None:
        """Returns the open stream of a request."""
        return self._streams.get(key)

    def find_any(self, key: str) -> WorkerStream | None:
        """Returns the stream of a request that is open, or has ended not long ago."""
        return self._streams.get(key) or self._ended.get(key, time.monotonic())

    @property
    def has_taken(self) -> bool:
        """Whether routers have taken streams, and may ask for them again."""
        return len(self._taken) > 0

    async def wait_none(self) -> None:
        """Returns when no stream is open."""
        await self._none_open.wait()

    def holds(self, key: str) -> bool:
        """Returns whether this worker has the stream, open or ended."""
        return key in self._streams or self._ended.get(key, time.monotonic()) is not None

    def replay(self, key: str, offset: int, prompt_offset: int | None = None) -> bool:
        """Replays a stream from token `offset` on, and the log probabilities of its prompt from `prompt_offset` on,
        unless it was just replayed; returns False if there is none."""
        now, stream = time.monotonic(), self.find_any(key)
        if stream is None:
            return False
        if stream.hold is not None:
            self.held.asked(stream, offset, prompt_offset)
            return True
        if now - stream.replayed_at >= limits.REPLAY_INTERVAL_S:
            if not stream.replayed_at:
                self._telemetry.replayed(stream, offset)
            stream.replayed_at = now
            stream.lacks(offset, prompt_offset)
            self._outbox.publish_again(stream, now)
        return True

    def abandon_all(self) -> None:
        """Abandons every stream without a terminal, because a new epoch begins."""
        for stream in list(self._streams.values()):
            self.abandon(stream, "abandoned")
        self._ended.clear()
        self.ended_guardians.clear()
        self._taken.clear()
        self.held.clear()

    def prompt_progress(self, key: str, computed_tokens: int, cached_tokens: int) -> None:
        """Logs the progress of a prompt that takes long."""
        if (stream := self._streams.get(key)) is not None:
            self._telemetry.prompt_progress(stream, computed_tokens, cached_tokens, time.monotonic())

    def tick(self) -> None:
        """Shows that silent streams are alive, logs long waits, probes clients that seem gone, forgets what is old."""
        now = time.monotonic()
        for stream in self._streams.values():
            # early enough that even a late tick keeps the limit
            if now - stream.last_chunk_at > limits.STREAM_KEEPALIVE_S - 2 * limits.TICK_S:
                self._outbox.put_head(stream, now)
            if not stream.first_token_sent and stream.slow.is_due(now - stream.accepted_at):
                self._telemetry.waits(stream, now - stream.accepted_at)
        self._telemetry.log_waits(self._load, now)
        self._stranded.tick(self._streams.values(), now)
        self.held.tick()
        self._outbox.flush()
        self._ended.expire(now)
        self._early_cancels.expire(now)
        for router_id, ended_at in list(self.ended_guardians.items()):
            if now - ended_at >= limits.ENDED_STREAM_TTL_S:
                del self.ended_guardians[router_id]

    @property
    def adapter_digests(self) -> set[str]:
        """The adapters that open streams use."""
        return {one.digest for stream in self._streams.values() for one in stream.run.adapters}

    def _load(self) -> messages.Load:
        return self._engine.load() if self._engine is not None else messages.Load()

    def running_requests(self, asked: internal.SnapshotRequest) -> list[internal.RunningRequest] | None:
        """Returns the open streams for a snapshot, with the tokens asked for; None while tokens wait for the broker."""
        if not self._outbox.flush():
            return None
        return [
            stream.snapshot(asked.known_tokens.get(key, stream.num_resumed if asked.wants_others else None))
            for key, stream in self._streams.items()
        ]

    def _start(self, run: internal.Run, headers: tracing.Headers) -> None:
        """Raises RequestError if the run can't be accepted. At most an earlier attempt is gone then."""
        engine, config = self._require_serving(run)
        request = to_engine_request(run, config, self.settings, self._chat, self._adapters.of_run(run))
        if self._exchange.may_fetch(run):
            has_remote_prefill = run.fetch_from is not None and run.fetch_from.leg_ms > 0
            request = codec.replace(request, is_held=True, has_remote_prefill=has_remote_prefill)
        now = time.monotonic()
        announcer = self._announcer
        gone = announcer.gone_subject(run.request_id)
        scheme = block_hash.scheme_of(config.fingerprint)
        token_bytes, stream_no = engine.token_bytes, next(self._stream_nos)
        stream = WorkerStream(run, announcer.model, announcer.worker_id, now, gone, token_bytes, scheme, stream_no)
        stream.note_first(self.find_any)
        stream.max_tokens = 0 if request.is_warm_up else request.sampling.max_tokens
        if run.params.return_sampling:
            stream.sampling = sampling_report(request.sampling)
        if request.reasoning_limit is not None:
            stream.max_reasoning_tokens = request.reasoning_limit.max_tokens
        check = StreamValidator(request, lambda output: None) if self.settings.debug else None
        if (earlier := self._streams.get(run.request_id)) is not None:
            self.abandon(earlier, "moved")
        self._reach.heard(run.router_id, lease_time(), run.router_network)
        try:
            engine.generate(request, partial(self._take, stream, check))
        except Exception:  # the earlier attempt is gone all the same, and its router asks another worker
            if earlier is not None:
                announcer.log.taken.append(stream.key)
                announcer.publish_events()
            raise
        # if the id was used before, resyncs refer to the new stream from now on
        self._ended.pop(stream.key)
        self._streams[stream.key] = stream
        stream.is_open = True
        self._none_open.clear()
        stream.slow = long_waits.BackoffTimer(self.settings.slow_wait_s)
        if run.remaining_ms is not None:
            expired = errors.make_error(errors.Code.DEADLINE_EXCEEDED)
            loop = asyncio.get_running_loop()
            stream.deadline = loop.call_later(run.remaining_ms / 1e3, self.cancel, stream.key, expired)
        self._telemetry.started(stream, request, headers, self._load(), announcer.health)
        announcer.log.started.append(stream.start_report(len(request.token_ids)))
        # until its constraint is compiled, it may still end with a terminal alone
        if request.constraint is None:
            self._outbox.put_head(stream, now)
        if request.is_held:
            self._exchange.start_fetch(run, request, partial(self._fetched, stream))
        self._outbox.flush()

    def _fetched(self, stream: WorkerStream, fetch: Fetch) -> None:
        """Releases a held stream once as many of its blocks as possible have been fetched."""
        if self._streams.get(stream.key) is not stream or self._engine is None:
            return
        try:
            self._announcer.log.fetches.append(stream.fetched(fetch))
            self._engine.release(stream.key)
        except Exception:  # outermost frame of a stream: the engine would hold it back forever
            self._telemetry.failed(stream)
            self._outbox.fail(stream)
        self._announcer.publish_events()  # routers measure the computation from here on

    def abandon(self, stream: WorkerStream, reason: str) -> None:
        """Ends a stream and its engine request without a terminal."""
        # first, so that the engine's last output for the stream is ignored
        self._forget(stream)
        self._outbox.remove(stream)
        if self._engine is not None:
            self._engine.abort(stream.key)
        self._telemetry.abandoned(stream, reason)

    def _end_early(self, stream: WorkerStream) -> None:
        """Makes the engine end a stream as cancelled; the stream's terminal says why."""
        assert self._engine is not None
        self._stranded.cancel(stream, time.monotonic())
        self._engine.abort(stream.key)
        self._outbox.flush()

    def _require_serving(self, run: internal.Run) -> Serving:
        """Returns the engine for a run. Raises RequestError if this worker can't accept the run now."""
        state, serving = self._announcer.state, self._announcer.serving
        if run.epoch != self._announcer.epoch:
            raise errors.request_error(errors.Code.NO_WORKER, "the run was meant for another epoch of this worker")
        if state.is_loadable:
            raise errors.request_error(errors.Code.NO_WORKER, "the model is not loaded")
        if state.is_ending:
            raise errors.request_error(errors.Code.SHUTTING_DOWN)
        if serving is None:
            raise errors.request_error(errors.Code.ENGINE_POISONED, "the engine is being restarted")
        if self._early_cancels.is_taken_back(run, time.monotonic()):
            raise errors.request_error(errors.Code.NO_WORKER, "the run was taken back before it arrived")
        if not subjects.is_inbox(run.reply, self.settings.inbox_prefixes, run.request_id.partition(":")[0]):
            raise errors.request_error(errors.Code.INVALID_REQUEST, "reply: is not an inbox", param="reply")
        live = self._streams.get(run.request_id)
        if live is not None and not live.is_replaced_by(run):
            raise errors.request_error(errors.Code.DUPLICATE_REQUEST)
        return serving

    def _take(self, stream: WorkerStream, check: StreamValidator | None, output: engine_output.Output) -> None:
        """Takes what the engine puts out for a stream. It is the error boundary of the stream: a bug in it ends this
        stream with `internal`, and no other."""
        # resumed tokens come before the stream is open, and an aborted engine request may still have outputs
        if (stream.terminal is not None or not stream.is_open) and not output.is_resumed:
            if output.finish_reason is messages.FinishReason.CANCELLED and stream.terminal is None:
                stream.last_words = output
            return
        if output.error is not None and stream.strand(output, time.monotonic()):
            return
        try:
            if check is not None:
                check(output)
            if output.resumed_texts is not None:
                stream.resume(output)
            elif output.is_constraint_ready:
                self._outbox.put_head(stream, time.monotonic())
            else:
                self._outbox.put(stream, output, time.monotonic())
        except Exception:  # outermost frame of a stream: in any case, its client gets a terminal
            self._telemetry.failed(stream)
            if output.is_resumed:  # the stream has not been accepted yet
                raise errors.request_error(errors.Code.INTERNAL) from None
            self._outbox.fail(stream)

    def _close(self, stream: WorkerStream, terminal_bytes: int) -> None:
        """Keeps a stream that has ended for a while, so that its client can ask for lost chunks."""
        self._forget(stream)
        self.next_turns.keep(stream)
        stream.shed()
        now = time.monotonic()
        self._ended.put(stream.key, stream, now, stream.memory_bytes + _GROWTH * terminal_bytes)
        self.ended_guardians[stream.guardian or ""] = now
        # it may have ended only here, and the engine would continue
        if self._engine is not None:
            self._engine.abort(stream.key)

    def _forget(self, stream: WorkerStream) -> None:
        del self._streams[stream.key]
        stream.is_open = False
        self._exchange.cancel(stream.key)
        if not self._streams:
            self._none_open.set()
        self.held.forget(stream)
        if stream.deadline is not None:
            stream.deadline.cancel()
