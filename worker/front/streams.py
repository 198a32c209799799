"""The streams that a front holds: accepts requests, cancels them, watches their deadlines, and lets them go."""

import asyncio
import time
from collections.abc import Callable

import structlog

from protocol import blocks, errors, internal, limits, messages, subjects
from worker import contract
from worker.front.announce import Announcer
from worker.front.outbox import Outbox
from worker.front.sampling import resolve
from worker.front.stream import Stream
from worker.validator import StreamValidator

_TICK_S = 1.0


class Streams:
    """All accepted requests of one worker by key, while an engine serves."""

    def __init__(
        self,
        announcer: Announcer,
        outbox: Outbox,
        max_new_tokens: int,
        inbox_prefixes: tuple[str, ...],
        *,
        validate: bool,
    ) -> None:
        self._announcer = announcer
        self._outbox = outbox
        self._max_new_tokens = max_new_tokens
        self._inbox_prefixes = inbox_prefixes
        self._validate = validate
        self._engine: contract.Engine | None = None
        self._config: contract.EngineConfig | None = None
        self._streams: dict[str, Stream] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Streams {len(self._streams)} open>"

    def use(self, engine: contract.Engine | None, config: contract.EngineConfig | None) -> None:
        """The engine for requests from now on; None while there is none."""
        self._engine, self._config = engine, config

    def find(self, key: str) -> Stream | None:
        return self._streams.get(key)

    def accept(self, run: internal.Run) -> None:
        """Starts a stream, or raises RequestError and leaves everything as it was."""
        self._check_state(run)
        assert self._engine is not None
        assert self._config is not None
        token_ids = _token_ids(run)
        request = contract.EngineRequest(
            key=run.request_id,
            token_ids=token_ids,
            sampling=resolve(run.params, len(token_ids), self._config, self._max_new_tokens),
            stop=tuple(run.params.stop),
        )
        now = time.monotonic()
        stream = Stream(run, self._announcer.model, self._announcer.worker_id, now)
        sink = self._sink(stream)
        self._engine.generate(request, StreamValidator(request, sink) if self._validate else sink)
        self._streams[stream.key] = stream
        if run.remaining_ms is not None:
            loop = asyncio.get_running_loop()
            self._timers[stream.key] = loop.call_later(run.remaining_ms / 1e3, self._expire, stream.key)
        self._announcer.started(stream.key, len(token_ids))
        self._outbox.put_head(stream, now)
        self._outbox.flush()
        self._log.info(
            "request_started",
            request_id=stream.key,
            worker_id=self._announcer.worker_id,
            attempt=run.attempt,
            prompt_tokens=len(token_ids),
            max_tokens=request.sampling.max_tokens,
        )

    def cancel(self, key: str, because: errors.Error | None = None) -> bool:
        """Ends a stream with `cancelled`, or with an error that says why; False if it is not held here."""
        stream = self._streams.get(key)
        if stream is None or self._engine is None:
            return False
        stream.end_with = because
        self._engine.abort(key)
        self._outbox.flush()
        return True

    def drop(self, key: str, attempt: int) -> bool:
        """Ends an attempt without a word to its client; False if it has spoken already."""
        stream = self._streams.get(key)
        if stream is None or stream.run.attempt > attempt:
            return True
        if stream.has_spoken:
            return False
        self._forget(stream)
        if self._engine is not None:
            self._engine.abort(key)
        self._announcer.finished(key)
        self._log.info(
            "request_finished",
            request_id=key,
            worker_id=self._announcer.worker_id,
            attempt=attempt,
            finish_reason="dropped",
        )
        return True

    async def tick(self) -> None:
        """Lets silent streams show that they are alive; runs until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            for stream in self._streams.values():
                if now - stream.spoke_at > limits.SILENT_CHUNK_S - _TICK_S:
                    self._outbox.put_head(stream, now)
            self._outbox.flush()

    def _check_state(self, run: internal.Run) -> None:
        """Raises RequestError where this worker can't take the request now."""
        if run.epoch != self._announcer.epoch:
            raise errors.request_error(errors.Code.NO_WORKER, "the run was meant for another life of this worker")
        if self._announcer.state is messages.WorkerState.DRAINING:
            raise errors.request_error(errors.Code.SHUTTING_DOWN)
        if self._engine is None or self._config is None:
            raise errors.request_error(errors.Code.ENGINE_POISONED, "the engine is being restarted")
        if not subjects.is_inbox(run.reply, self._inbox_prefixes):
            raise errors.request_error(errors.Code.INVALID_REQUEST, "reply: is no inbox", param="reply")
        if run.request_id in self._streams:
            raise errors.request_error(errors.Code.DUPLICATE_REQUEST)

    def _sink(self, stream: Stream) -> Callable[[contract.Output], None]:
        def take(output: contract.Output) -> None:
            if self._streams.get(stream.key) is not stream:
                return
            self._outbox.put(stream, output, time.monotonic())
            if output.finish_reason is not None:
                self._forget(stream)

        return take

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.key]
        timer = self._timers.pop(stream.key, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, key: str) -> None:
        self.cancel(key, errors.make_error(errors.Code.DEADLINE_EXCEEDED))


def _token_ids(run: internal.Run) -> list[int]:
    """The prompt of a run. Raises RequestError for one that is empty or malformed."""
    try:
        token_ids = blocks.from_bytes(run.token_ids)
    except ValueError as error:
        raise errors.request_error(errors.Code.INVALID_REQUEST, str(error), param="token_ids") from error
    if not token_ids:
        raise errors.request_error(errors.Code.INVALID_REQUEST, "the prompt has no tokens", param="token_ids")
    return token_ids
