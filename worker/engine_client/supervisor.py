"""Keeps an engine running: starts it, notices its end, and starts another after a growing pause (decision 0023)."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import EngineDiedError
from tokenbus.worker.engine_client.listener import EngineListener

INITIAL_BACKOFF_S = 0.1
MAX_BACKOFF_S = 15.0
HEALTHY_AFTER_S = 30.0
"""An engine that lived this long is restarted after the initial pause."""
TAKEOVER_TIMEOUT_S = 60.0
"""Open streams wait this long for the next engine; then they end with `worker_lost`."""

MAX_START_FAILURES = 3
"""After this many engines have died before any served, another start won't help."""


def next_backoff(backoff_s: float, uptime_s: float) -> float:
    """Returns the pause before the next start, after an engine that lived for `uptime_s`."""
    return INITIAL_BACKOFF_S if uptime_s >= HEALTHY_AFTER_S else min(2 * backoff_s, MAX_BACKOFF_S)


class EngineSupervisor:
    """Runs one engine after another, each made by `make_engine`."""

    def __init__(
        self,
        make_engine: Callable[[], EngineClient],
        worker_id: str,
        listener: EngineListener,
        step_timeout_s: float,
        prepare: Callable[[EngineClient], Awaitable[None]] | None = None,
        *,
        is_patient: bool = True,
    ) -> None:
        """`prepare` makes a started engine ready to serve, and may raise what its start may raise. `is_patient`:
        loading a model that has served is retried indefinitely when it can no longer be loaded."""
        self._make_engine = make_engine
        self._worker_id = worker_id
        self._listener = listener
        self._step_timeout_s = step_timeout_s
        self._prepare = prepare
        self._is_patient = is_patient
        self.engine: EngineClient | None = None
        """The engine that is starting or serving, or the last one that did."""
        self._dead: EngineClient | None = None
        """The last engine that served: it holds the open streams until the next one takes them over."""
        self._died_at = 0.0
        self._is_closed = False
        self._has_served = False
        self.restarts = 0
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<EngineSupervisor of {self.engine!r}, {self.restarts} restarts>"

    async def run(self) -> None:
        """Runs until cancelled or cleaned up. Raises ModelError if the model can't be loaded, unless it has
        served and this is patient, and if `MAX_START_FAILURES` engines have died before one served."""
        backoff_s = INITIAL_BACKOFF_S
        while not self._is_closed:
            began = time.monotonic()
            reason = await self._run_engine()
            if self._is_closed:
                return
            backoff_s = next_backoff(backoff_s, time.monotonic() - began) if self.restarts else INITIAL_BACKOFF_S
            self.restarts += 1
            if not self._has_served and self.restarts >= MAX_START_FAILURES:
                raise ModelError(
                    f"the engine died {self.restarts} times before it could serve; the last time: {reason}"
                )
            self._log.error("engine_died", worker_id=self._worker_id, reason=reason, restart_in_s=backoff_s)
            await asyncio.sleep(backoff_s)

    def tick(self, now: float, gap_s: float) -> None:
        """Checks for a stuck step and a late takeover. Call it a few times a second, `gap_s` after the last call."""
        if self.engine is None:
            return
        if self._dead is not None and self._dead.has_died:
            # the next engine may fail to start repeatedly: count from the first death
            self._died_at = self._died_at or now
            if now - self._died_at > TAKEOVER_TIMEOUT_S:
                self._dead.fail_streams()
        self.engine.check_step(now, gap_s, self._step_timeout_s)

    async def cleanup(self) -> None:
        """Ends the engine and starts no other."""
        self._is_closed = True
        for engine in (self.engine, self._dead):
            if engine is not None:
                await engine.cleanup()

    async def _run_engine(self) -> str:
        """Runs one engine, which takes over the streams that the last one left; returns why it ended."""
        engine = self.engine = self._make_engine()
        engine.listener = self._listener
        reason = ""
        try:
            config = await engine.start(self._worker_id)
            if self._prepare is not None:
                await self._prepare(engine)
            self._has_served = True
            self._listener.engine_started(engine, config)
            engine.report_recovered()
            # after `engine_started`, so that outputs of these streams find the engine set
            if self._dead is not None:
                engine.take_over(self._dead)
            self._dead, self._died_at = engine, 0.0
            await engine.died()
        except EngineDiedError:
            pass
        except ModelError as error:
            # a model that has never served can't be loaded; one that has served may load again
            if not self._has_served or not self._is_patient:
                raise
            reason = str(error)
        finally:
            self._listener.engine_died()
            how = await engine.close()
        return reason or how
