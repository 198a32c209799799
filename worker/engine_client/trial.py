"""Tries a model out in a process of its own, before it joins the engine process that others' streams depend on.

An engine library trusts a model's file more than it should: on some files it ends its process, while it loads them or
in their first step. Replicas share an engine process, since that is how they share weights and KV memory, so such a
file would end the streams of every neighbour, again and again. Here it ends a process that nobody depends on, and the
model is refused with what happened. That process may take most of the memory that is free, and is the first to end if
none is left. What has been tried out is loaded a second time, from the system's file cache; nothing else is."""

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from tokenbus.protocol import tasks
from tokenbus.protocol.wire import block_hash
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_request import Sampling
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.engine_process import (
    DeviceFailedError,
    EngineConnection,
    EngineDiedError,
    EngineProcess,
)

STEP_TIMEOUT_S = 600.0
"""Time for the first step."""
_MAX_CONTEXT_LENGTH = 512
_PROMPT = block_hash.pack_token_ids([0, 1, 2, 3])

_NOTE_INTERVAL_S = 0.5
_MAX_TRYING = 4
"""Models that are tried out at the same time. One whose files are on a mount that does not answer takes a place for
minutes, and others must not wait for it."""


class Trials:
    """Tries models out, each time: a file may have changed since the last one."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables` are added to the environment of the processes."""
        self._variables = variables
        self._places = asyncio.Semaphore(_MAX_TRYING)

    def __repr__(self) -> str:
        return f"<Trials {self._places!r}>"

    async def run(self, settings: EngineSettings, note: Callable[[], None]) -> None:
        """Tries a model out; `note` is called twice a second meanwhile. Raises ModelError, and ModelTooLargeError if
        there is too little memory for it beside the others."""
        trying = tasks.awaited(self._try_out(settings))
        try:
            while not (await asyncio.wait([trying], timeout=_NOTE_INTERVAL_S))[0]:
                note()
            trying.result()
        finally:
            trying.cancel()

    async def _try_out(self, settings: EngineSettings) -> None:
        async with self._places:
            await try_out(settings, self._variables)


async def try_out(settings: EngineSettings, variables: Mapping[str, str]) -> None:
    """Loads a model and computes a step. Raises ModelError, naming the problem, for a model that can't be loaded, or on
    which the engine ends or hangs, and ModelTooLargeError if there is too little memory for it beside the others."""
    process = EngineProcess(variables, is_trial=True)
    stepped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def take(report: ipc.Report) -> None:
        if isinstance(report, ipc.StepReport) and report.outputs and not stepped.done():
            stepped.set_result(True)

    def lost() -> None:
        if not stepped.done():
            stepped.set_result(False)

    connection: EngineConnection | None = None
    try:
        link = await process.open(_small(settings))
        connection = EngineConnection(link, take, lost)
        config = (await connection.open()).config
        if config.max_num_seqs > 0 and config.context_length > len(_PROMPT):
            add = ipc.Add(0, _PROMPT, Sampling(max_tokens=1, ignore_eos=True))
            connection.write(ipc.encode(add))
            async with asyncio.timeout(STEP_TIMEOUT_S):
                if not await stepped:
                    raise EngineDiedError("the engine process ended in a step")
    except DeviceFailedError as error:
        raise ModelError(str(error)) from error
    except EngineDiedError as error:
        how = str(error) if connection is None else await connection.close()
        raise ModelError(f"the engine ended while it loaded the model or computed its first step: {how}") from error
    except TimeoutError as error:
        raise ModelError(f"the model has computed nothing within {STEP_TIMEOUT_S:g} s") from error
    finally:
        stepped.cancel()
        await process.end()


def _small(settings: EngineSettings) -> EngineSettings:
    """Returns settings for a replica that takes little memory beside its weights."""
    # without a context that was asked for, a model has its own, which may be shorter than any that is named here
    length = min(settings.context_length, _MAX_CONTEXT_LENGTH)
    tokens = length or _MAX_CONTEXT_LENGTH
    return msgspec.structs.replace(
        settings,
        context_length=length,
        max_num_seqs=1,
        threads=1,  # several wait for each other by computing, which others' streams would wait for too
        kv_tokens=max(tokens, settings.kv_block_size),
        max_embed_tokens=min(settings.max_embed_tokens, tokens),
        kv_limit_bytes=0,
        kv_pool_bytes=0,
        kv_reserved_bytes=0,
        memory_parts=1,
        memory_kept_bytes=0,
        host_cache_mib=0,
        keep_cache="",
    )
