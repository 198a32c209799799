"""Keeps an engine running: starts it, notices its end, starts the next one with growing pauses."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from tokenbus.worker import contract
from tokenbus.worker.engine_client.engine import ChildEngine
from tokenbus.worker.engine_client.link import EngineDiedError

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 15.0
HEALTHY_AFTER_S = 30.0
"""An engine that has lived this long has earned a quick restart."""
PATIENCE_S = 60.0
"""How long streams wait for an engine to go on with them."""

MOST_DEATHS_AT_START = 3
"""Engines that may die before one has ever served; then another start won't help."""

_STOOD_STILL_S = 1.0
"""A front that was away for longer has not heard of the engine's steps meanwhile."""


class Listener(Protocol):
    """Who must know which engine serves."""

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig) -> None: ...

    def engine_died(self) -> None: ...


def next_pause(pause_s: float, lived_s: float) -> float:
    """How long to wait before the next start, after an engine that lived for `lived_s`."""
    return FIRST_PAUSE_S if lived_s >= HEALTHY_AFTER_S else min(2 * pause_s, LONGEST_PAUSE_S)


class Supervisor:
    """Runs one engine after another made by `make_engine`."""

    def __init__(
        self, make_engine: Callable[[], ChildEngine], worker_id: str, listener: Listener, step_timeout_s: float
    ) -> None:
        self._make_engine = make_engine
        self._worker_id = worker_id
        self._listener = listener
        self._step_timeout_s = step_timeout_s
        self._engine: ChildEngine | None = None
        self._dead: ChildEngine | None = None
        """The last one that served: it holds the open streams until the next one serves."""
        self._died_at = 0.0
        self._is_over = False
        self._has_served = False
        self.restarts = 0
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Supervisor of {self._engine!r}, {self.restarts} restarts>"

    @property
    def engine(self) -> ChildEngine | None:
        return self._engine

    async def run(self) -> None:
        """Until cancelled or cleaned up. Raises EngineStartError when no engine has ever served, and one says that
        another won't help or `MOST_DEATHS_AT_START` have died."""
        pause_s = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            reason = await self._live()
            if self._is_over:
                return
            pause_s = next_pause(pause_s, time.monotonic() - began) if self.restarts else FIRST_PAUSE_S
            self.restarts += 1
            if not self._has_served and self.restarts >= MOST_DEATHS_AT_START:
                raise contract.EngineStartError(
                    f"the engine died {self.restarts} times before it could serve, the last time like this: {reason}"
                )
            self._log.error("engine_died", worker_id=self._worker_id, reason=reason, restart_in_s=pause_s)
            await asyncio.sleep(pause_s)

    def watch(self, now: float, gap_s: float) -> None:
        """To be called a few times a second; `gap_s` is the time since the last call."""
        if self._engine is None:
            return
        if self._dead is not None and self._dead.has_died:
            self._died_at = self._died_at or now
            if now - self._died_at > PATIENCE_S:
                self._dead.give_up()
        if gap_s > _STOOD_STILL_S:
            self._engine.forgive(now)
        else:
            self._engine.end_stuck_step(now, self._step_timeout_s)

    async def cleanup(self) -> None:
        """Ends the engine, and starts no other."""
        self._is_over = True
        for engine in (self._engine, self._dead):
            if engine is not None:
                await engine.cleanup()

    async def _live(self) -> str:
        """One engine's life; returns why it ended. It begins with the streams that the last one left."""
        engine = self._engine = self._make_engine()
        engine.on_lost = self._listener.engine_died
        reason = ""
        try:
            config = await engine.start(self._worker_id)
            self._has_served = True
            self._listener.engine_started(engine, config)
            if self._dead is not None:
                engine.take_over(self._dead)
            self._dead, self._died_at = engine, 0.0
            await engine.died()
        except EngineDiedError:
            pass
        except contract.EngineStartError as error:
            if not self._has_served:
                raise
            reason = str(error)
        finally:
            self._listener.engine_died()
            how = await engine.close()
        return reason or how
