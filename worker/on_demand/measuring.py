"""Reads models' facts from their files, several at a time: some have to be downloaded, and some never come."""

import asyncio
import contextlib
from functools import partial

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory.fit import ModelFacts
from tokenbus.worker.files.regular import on_daemon_thread
from tokenbus.worker.on_demand import model_sizes

_TIMEOUT_S = 300.0
_MAX_MEASURED = 32
"""The number of models that are measured at the same time."""


class Measuring:
    """The threads that read models' files."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(_MAX_MEASURED)
        self._num_hung = 0
        """Measurements that were given up, while their threads still wait for files."""
        self._is_stopped = False

    def __repr__(self) -> str:
        return f"<Measuring, {self._num_hung} hung>"

    def stop(self) -> None:
        """Ends the threads, each with the next bytes of its download. Those that wait for a mount keep no process from
        ending."""
        self._is_stopped = True

    async def facts(self, settings: EngineSettings) -> ModelFacts:
        """Raises ModelError and OSError; ModelError too if nothing comes for long, as from a mount that does not
        answer."""
        await self._take_place(settings.model)
        has_progressed = False

        def note(_: float) -> None:
            nonlocal has_progressed
            has_progressed = True
            if self._is_stopped:
                raise ModelError("the worker stops")

        # not on the event loop's own threads, which also resolve the broker's name
        reading = on_daemon_thread(partial(model_sizes.read_facts, settings, note))
        reading.add_done_callback(self._ended)
        while not (await asyncio.wait([reading], timeout=_TIMEOUT_S))[0]:
            if not has_progressed:
                self._num_hung += 1
                reading.add_done_callback(self._hung_ended)
                raise ModelError(f"{settings.model}: nothing of its files came for {_TIMEOUT_S:g} s")
            has_progressed = False
        return reading.result()

    async def _take_place(self, name: str) -> None:
        """Waits until fewer models are measured. Raises ModelError if all that are wait for mounts that do not
        answer."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._places.acquire()
                    return
            if self._num_hung == _MAX_MEASURED:
                raise ModelError(f"{name}: {_MAX_MEASURED} other models are on mounts that do not answer")

    def _ended(self, reading: "asyncio.Future[ModelFacts]") -> None:
        self._places.release()
        reading.exception()  # perhaps nobody waits for it any more

    def _hung_ended(self, _: "asyncio.Future[ModelFacts]") -> None:
        self._num_hung -= 1
