"""The streams that a frontend holds: accepts requests, cancels, drops and repeats them, and lets them go."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from tokenbus.protocol.telemetry import backoff, tracing
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import block_hash, errors, internal, limits, messages, subjects, validation
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker import contract
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.outbox import Outbox
from tokenbus.worker.frontend import spans
from tokenbus.worker.frontend.metrics import ReplicaMetrics
from tokenbus.worker.frontend.settings import FrontendSettings
from tokenbus.worker.streams.liveness import ClientLiveness
from tokenbus.worker.streams.sampling import resolve
from tokenbus.worker.streams.stream import Stream
from tokenbus.worker.validator import StreamValidator

_EVERY_ATTEMPT = 2**63 - 1
_CANCEL_MARGIN_S = 0.25


class _EarlyCancel(NamedTuple):
    """A drop or cancel of a request that was not here."""

    attempt: int
    at: float


class Streams:
    """All accepted requests of one worker by key, and for a while those that have ended."""

    def __init__(
        self,
        announcer: Announcer,
        outbox: Outbox,
        metrics: ReplicaMetrics,
        settings: FrontendSettings,
        tracer: tracing.Tracer,
    ) -> None:
        self._announcer = announcer
        self._outbox = outbox
        self._metrics = metrics
        self.settings = settings
        self._tracer = tracer
        self._engine: contract.Engine | None = None
        self._config: contract.EngineConfig | None = None
        self._streams: dict[str, Stream] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._liveness = ClientLiveness()
        self._ended: TTLCache[Stream] = TTLCache(limits.ENDED_STREAM_TTL_S, limits.MAX_ENDED_STREAM_BYTES)
        self._early_cancels: TTLCache[_EarlyCancel] = TTLCache(limits.WITHDRAWN_TTL_S, limits.MAX_WITHDRAWN)
        self._log = structlog.get_logger()
        outbox.on_truncated = self._truncated

    def __repr__(self) -> str:
        return f"<Streams {len(self._streams)} open, {len(self._ended)} ended, {self._liveness!r}>"

    def set_engine(self, engine: contract.Engine, config: contract.EngineConfig) -> None:
        """The engine for requests from now on, which also goes on with those that are open."""
        self._engine, self._config = engine, config

    def clear_engine(self) -> None:
        """The engine is no more: nothing new is taken until there is another. What is open can still be ended."""
        self._config = None

    def accept(self, run: internal.Run, headers: tracing.Headers = None) -> internal.RunReply:
        """Starts a stream; a run that is refused changes nothing. `headers` may say which trace it belongs to."""
        try:
            self._start(run, headers)
        except errors.RequestError as error:
            return self._refusal(run, error.error)
        return internal.RunReply(accepted=True)

    def cancel(self, key: str, because: errors.Error | None = None) -> bool:
        """Ends a stream with `cancelled`, or with an error that says why; False if it is not held here."""
        stream = self._streams.get(key)
        if stream is None or self._engine is None:
            now = time.monotonic()
            if self._ended.get(key, now) is None:
                self._early_cancels.put(key, _EarlyCancel(_EVERY_ATTEMPT, now), now)
            return False
        stream.cancel_error = because
        self._engine.abort(key)
        self._outbox.flush()
        return True

    def drop(self, key: str, attempt: int) -> bool:
        """Ends an attempt without a word to its client; False if it has spoken already, or has ended."""
        now = time.monotonic()
        stream = self._streams.get(key)
        if stream is None:
            ended = self._ended.get(key, now)
            if ended is not None and ended.run.attempt == attempt:
                return False
            known = self._early_cancels.get(key, now)
            if known is None or known.attempt < attempt:
                self._early_cancels.put(key, _EarlyCancel(attempt, now), now)
            return True
        if stream.run.attempt > attempt:
            return True
        if stream.first_token_sent:
            return False
        self._abandon(stream, "dropped")
        self._announcer.request_finished(key)
        self._announcer.publish_events()  # before the answer, so that it is not taken for the end of a later attempt
        return True

    def holds(self, key: str) -> bool:
        """Whether a stream is here, live or lately ended."""
        return key in self._streams or self._ended.get(key, time.monotonic()) is not None

    def replay(self, key: str, offset: int) -> bool:
        """Publishes a stream again from a token on, unless that was just done; False if it is not held here."""
        now = time.monotonic()
        stream = self._streams.get(key) or self._ended.get(key, now)
        if stream is None:
            return False
        self._liveness.forget(key)
        if now - stream.replayed_at >= limits.REPLAY_INTERVAL_S:
            if not stream.replayed_at:
                self._log.info("stream_replayed", request_id=key, worker_id=self._announcer.worker_id, offset=offset)
            stream.replayed_at = now
            self._outbox.replay(stream, offset, now)
        return True

    def abandon_all(self) -> None:
        """Gives every stream up without a word: a new life of this worker begins."""
        for stream in list(self._streams.values()):
            self._abandon(stream, "abandoned")
        self._ended.clear()

    def no_responders(self, key: str, *, is_probe: bool) -> None:
        """Nobody has listened to a chunk, or to the empty one that was sent to make sure."""
        now = time.monotonic()
        if key not in self._streams:
            return
        if not is_probe:
            self._liveness.no_responders(key, now)
        elif self._liveness.probe_no_responders(key, now):
            self._log.info("client_gone", request_id=key, worker_id=self._announcer.worker_id)
            self.cancel(key)

    def reconnected(self) -> None:
        """The frontend itself was away from the broker, and so perhaps were its clients."""
        self._liveness.reconnected(time.monotonic())

    def tick(self) -> None:
        """Lets silent streams show that they are alive, makes sure of clients, forgets what is old."""
        now = time.monotonic()
        for stream in self._streams.values():
            if now - stream.last_chunk_at > limits.STREAM_KEEPALIVE_S - 2 * limits.TICK_S:
                self._outbox.put_head(stream, now)
            if not stream.first_token_sent and stream.slow.is_due(now - stream.accepted_at):
                self._log_wait(stream, now - stream.accepted_at)
        for key in self._liveness.due_probes(now):
            self._outbox.put_probe(self._streams[key], now)
        self._outbox.flush()
        self._ended.expire(now)
        self._early_cancels.expire(now)

    def running_requests(self) -> list[internal.RunningRequest]:
        """What a snapshot says of the open streams."""
        return [
            internal.RunningRequest(id=key, attempt=stream.run.attempt, first_token_sent=stream.first_token_sent)
            for key, stream in self._streams.items()
        ]

    def _start(self, run: internal.Run, headers: tracing.Headers) -> None:
        """Raises RequestError and leaves everything as it was where the run can't be accepted."""
        self._check_state(run)
        assert self._engine is not None
        assert self._config is not None
        request = _request_of(run, self._config, self.settings.max_new_tokens)
        now = time.monotonic()
        announcer = self._announcer
        gone = announcer.gone_subject(run.request_id)
        stream = Stream(run, announcer.model, announcer.worker_id, now, gone, self._engine.token_bytes)
        sink = self._sink(stream)
        sink = StreamValidator(request, sink) if self.settings.debug else sink
        self._engine.generate(request, self._safe(stream, sink))
        self._ended.pop(stream.key)
        self._streams[stream.key] = stream
        stream.slow = backoff.BackoffTimer(self.settings.slow_wait_s)
        stream.span = spans.begin(self._tracer, run, headers, announcer.model, announcer.worker_id)
        if run.remaining_ms is not None:
            loop = asyncio.get_running_loop()
            self._timers[stream.key] = loop.call_later(run.remaining_ms / 1e3, self._expire, stream.key)
        self._announce_start(stream, request, now)

    def _announce_start(self, stream: Stream, request: contract.EngineRequest, now: float) -> None:
        """To routers at once, before the head: none may take the id again."""
        self._announcer.request_started(stream.key, len(request.token_ids))
        self._announcer.publish_events()
        self._outbox.put_head(stream, now)
        self._outbox.flush()
        self._log.info(
            "request_started",
            request_id=stream.key,
            worker_id=self._announcer.worker_id,
            attempt=stream.run.attempt,
            prompt_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
        )

    def _log_wait(self, stream: Stream, waited_s: float) -> None:
        load = self._engine.load() if self._engine is not None else messages.Load()
        self._log.warning(
            "request_waiting",
            request_id=stream.key,
            worker_id=self._announcer.worker_id,
            attempt=stream.run.attempt,
            waits_for="first_token",
            waited_s=round(waited_s, 1),
            running=load.running,
            waiting=load.waiting,
            step_age_ms=round(load.step_age_ms),
        )

    def _refusal(self, run: internal.Run, error: errors.Error) -> internal.RunReply:
        live = self._streams.get(run.request_id)
        self._metrics.request_refused(error.code)
        return internal.RunReply(
            accepted=False,
            error=error,
            same_reply=live is not None and live.run.reply == run.reply,
            cancelled=self._is_cancelled_early(run, _EVERY_ATTEMPT),
        )

    def _abandon(self, stream: Stream, reason: str) -> None:
        """Lets a stream go, and its engine request with it, without a word to its client."""
        self._forget(stream)
        if self._engine is not None:
            self._engine.abort(stream.key)
        self._metrics.request_finished(reason, None, None)
        self._log.info(
            "request_finished",
            request_id=stream.key,
            worker_id=self._announcer.worker_id,
            attempt=stream.run.attempt,
            finish_reason=reason,
        )
        stream.span.set_error(reason)
        stream.span.end()

    def _check_state(self, run: internal.Run) -> None:
        """Raises RequestError where this worker can't take the request now."""
        if run.epoch != self._announcer.epoch:
            raise errors.request_error(errors.Code.NO_WORKER, "the run was meant for another life of this worker")
        if self._announcer.state is messages.WorkerState.DRAINING:
            raise errors.request_error(errors.Code.SHUTTING_DOWN)
        if self._engine is None or self._config is None:
            raise errors.request_error(errors.Code.ENGINE_POISONED, "the engine is being restarted")
        if self._is_cancelled_early(run, run.attempt):
            raise errors.request_error(errors.Code.NO_WORKER, "the run was taken back before it came")
        if not subjects.is_inbox(run.reply, self.settings.inbox_prefixes, run.request_id.partition(":")[0]):
            raise errors.request_error(errors.Code.INVALID_REQUEST, "reply: is no inbox", param="reply")
        if run.request_id in self._streams:
            raise errors.request_error(errors.Code.DUPLICATE_REQUEST)

    def _is_cancelled_early(self, run: internal.Run, attempt: int) -> bool:
        """Whether that attempt was taken back before it came.

        A cancel counts only if it came clearly after the request did: an earlier one was meant for an earlier request
        of that id, and one at the same time has reached the router too."""
        now = time.monotonic()
        known = self._early_cancels.get(run.request_id, now)
        if known is None or known.attempt < attempt:
            return False
        if known.attempt < _EVERY_ATTEMPT or run.age_ms is None:
            return True
        made_at = now - run.age_ms / 1e3
        return known.at >= made_at + _CANCEL_MARGIN_S

    def _sink(self, stream: Stream) -> Callable[[contract.Output], None]:
        def take(output: contract.Output) -> None:
            if self._streams.get(stream.key) is not stream:
                return
            self._outbox.put(stream, output, time.monotonic())
            if output.finish_reason is not None:
                self._forget(stream)
                self._ended.put(stream.key, stream, time.monotonic(), stream.memory_bytes)

        return take

    def _safe(self, stream: Stream, sink: contract.Sink) -> contract.Sink:
        """A sink that never raises: what goes wrong in it ends its own stream, and no other."""

        def take(output: contract.Output) -> None:
            try:
                sink(output)
            except Exception:  # outermost frame of a stream: whatever went wrong, it gets its terminal
                self._log.exception("stream_failed", request_id=stream.key, worker_id=self._announcer.worker_id)
                if self._streams.get(stream.key) is stream:
                    self._truncated(stream)
                    self._outbox.put(stream, stream.internal_error(), time.monotonic())

        return take

    def _truncated(self, stream: Stream) -> None:
        """Has a stream end here that its engine would go on with."""
        if self._streams.get(stream.key) is stream:
            self._forget(stream)
            self._ended.put(stream.key, stream, time.monotonic(), stream.memory_bytes)
            if self._engine is not None:
                self._engine.abort(stream.key)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.key]
        self._liveness.forget(stream.key)
        timer = self._timers.pop(stream.key, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, key: str) -> None:
        self.cancel(key, errors.make_error(errors.Code.DEADLINE_EXCEEDED))


def _request_of(run: internal.Run, config: contract.EngineConfig, max_new_tokens: int) -> contract.EngineRequest:
    """What the engine is asked for. Raises RequestError for a run that it can't serve."""
    token_ids = _token_ids(run)
    _check_features(run.params, config)
    return contract.EngineRequest(
        key=run.request_id,
        token_ids=token_ids,
        sampling=resolve(run.params, len(token_ids), config, max_new_tokens),
        stop=tuple(run.params.stop_strings),
        tenant=subjects.key_to_tenant(run.request_id),
        cache_salt=run.params.cache_salt or "",
        cache_prompt=run.params.cache_prompt is not False,
        priority=run.params.priority or 0,
        return_progress=bool(run.params.return_progress) and run.params.is_streamed,
    )


def _check_features(params: GenerationParams, config: contract.EngineConfig) -> None:
    for need in validation.required_run_features(params):
        if need.feature not in config.features:
            raise errors.request_error(
                errors.Code.UNSUPPORTED, f"{need.param} is not served by this engine", param=need.param
            )


def _token_ids(run: internal.Run) -> list[int]:
    """The prompt of a run. Raises RequestError for one that is empty or malformed."""
    try:
        token_ids = block_hash.unpack_token_ids(run.token_ids)
    except ValueError as error:
        raise errors.request_error(errors.Code.INVALID_REQUEST, str(error), param="token_ids") from error
    if not token_ids:
        raise errors.request_error(errors.Code.INVALID_REQUEST, "the prompt has no tokens", param="token_ids")
    return token_ids
