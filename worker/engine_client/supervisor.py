"""Keeps an engine running: starts it, notices its end, and starts another after a growing pause (decision 0023)."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import DeviceFailedError, EngineDiedError

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
    """Runs one engine after another, all at the other end of one client."""

    def __init__(
        self,
        engine: EngineClient,
        worker_id: str,
        step_timeout_s: float,
        prepare: Callable[[EngineClient], Awaitable[None]] | None = None,
        *,
        is_patient: bool = True,
    ) -> None:
        """`prepare` makes a started engine ready to serve, and may raise what its start may raise. `is_patient`:
        loading a model that has served is retried indefinitely when it can no longer be loaded."""
        self.engine = engine
        self._worker_id = worker_id
        self._step_timeout_s = step_timeout_s
        self._prepare = prepare
        self._is_patient = is_patient
        self._is_closed = False
        self._has_served = False
        self._is_serving = False
        self._unserved_since: float | None = None
        """When streams began to wait for the next engine."""
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
        if self._is_serving or not self._has_served:
            self._unserved_since = None
        elif self._unserved_since is None:  # the next engine may fail to start repeatedly: count from the first death
            self._unserved_since = now
        elif now - self._unserved_since > TAKEOVER_TIMEOUT_S:
            self.engine.fail_streams()
        self.engine.check_step(now, gap_s, self._step_timeout_s)

    async def cleanup(self) -> None:
        """Ends the engine and starts no other."""
        self._is_closed = True
        await self.engine.cleanup()

    async def _run_engine(self) -> str:
        """Runs one engine; returns why it ended."""
        reason = ""
        try:
            await self.engine.start(self._worker_id, self._prepare)
            self._has_served = self._is_serving = True
            await self.engine.died()
        except EngineDiedError as error:
            reason = str(error) if isinstance(error, DeviceFailedError) else ""
        except ModelError as error:
            # a model that has never served can't be loaded; one that has served may load again
            if not self._has_served or not self._is_patient:
                raise
            reason = str(error)
        finally:
            self._is_serving = False
            self.engine.listener.engine_died()
            how = await self.engine.close()
        return reason or how
