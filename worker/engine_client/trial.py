"""Tries a model out in a process of its own, before it joins the engine process that others' streams depend on.

An engine library trusts a model's file more than it should: on some files it ends its process, while it loads them or
in their first step. Replicas share an engine process, since that is how they share weights and KV memory, so such a
file would end the streams of every neighbour, again and again. Here it ends a process that nobody depends on, and the
model is refused with what happened. That process may take most of the memory that is free, and is the first to end if
none is left. What has been tried out is loaded a second time, from the system's file cache."""

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from tokenbus.protocol import tasks
from tokenbus.protocol.wire import block_hash
from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError
from tokenbus.worker.contract.engine_request import Sampling
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.engine_process import (
    DeviceFailedError,
    EngineConnection,
    EngineDiedError,
    EngineProcess,
)
from tokenbus.worker.files.regular import on_thread

STEP_TIMEOUT_S = _LOAD_TIMEOUT_S = 600.0
"""Time for the first step, and for a load to get further."""
_MAX_CONTEXT_LENGTH = 512
_PROMPT = block_hash.pack_token_ids([0, 1, 2, 3])

_NOTE_INTERVAL_S = 0.5
_MAX_TRIED = 256
_MAX_TRYING = 4
"""Models that are tried out at the same time. One whose files are on a mount that does not answer takes a place for
minutes, and others must not wait for it."""
_MAX_FILES = 4_096
_Version = tuple[str, int, int, int]
_Files = tuple[bytes, tuple[_Version, ...]]


class Trials:
    """Tries models out, each once, unless its files or settings change or it is on the Hub."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables` are added to the environment of the processes."""
        self._variables = variables
        self._tried: set[_Files] = set()
        self._places = asyncio.Semaphore(_MAX_TRYING)

    def __repr__(self) -> str:
        return f"<Trials of {len(self._tried)} models>"

    async def run(self, settings: EngineSettings, note: Callable[[], None]) -> None:
        """Tries a model out, unless the same files have been; `note` is called twice a second meanwhile. Raises
        ModelError."""
        files = await on_thread(settings.model, partial(_files_of, settings), lambda _: None)
        if files in self._tried:
            return
        trying = tasks.awaited(self._try_out(settings))
        try:
            while not (await asyncio.wait([trying], timeout=_NOTE_INTERVAL_S))[0]:
                note()
            trying.result()
        finally:
            trying.cancel()
        if len(self._tried) >= _MAX_TRIED:
            self._tried.clear()
        if files is not None:
            self._tried.add(files)

    async def _try_out(self, settings: EngineSettings) -> None:
        async with self._places:
            await try_out(settings, self._variables)


def _files_of(settings: EngineSettings) -> _Files | None:
    """Names a model with its settings, and all files in its folder and the folders in that, as they are now; None if
    they are elsewhere, too many, or can't be listed."""
    model = settings.model
    if not os.path.exists(model):
        return None
    folder = model if os.path.isdir(model) else os.path.dirname(model) or "."
    try:
        folders = [folder, *(entry.path for entry in os.scandir(folder) if entry.is_dir())][:_MAX_FILES]
        entries = (entry for one in folders for entry in os.scandir(one) if entry.is_file())
        found = tuple(sorted(_version_of(entry) for entry in itertools.islice(entries, _MAX_FILES + 1)))
    except OSError:
        return None
    return (msgspec.msgpack.encode(settings), found) if len(found) <= _MAX_FILES else None


def _version_of(entry: "os.DirEntry[str]") -> _Version:
    # the time of a file's last change can't be set, unlike that of its content
    found = entry.stat()
    return entry.path, found.st_ino, found.st_size, found.st_ctime_ns


async def try_out(settings: EngineSettings, variables: Mapping[str, str]) -> None:
    """Loads a model and computes a step. Raises ModelError, naming the problem, for a model that can't be loaded, or
    on which the engine ends or hangs. One that finds no memory beside the others passes: that is for them to decide."""
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
        connection = EngineConnection(link, take, lost, _LOAD_TIMEOUT_S)
        config = (await connection.open()).config
        if config.max_num_seqs > 0 and config.context_length > len(_PROMPT):
            add = ipc.Add(0, _PROMPT, Sampling(max_tokens=1, ignore_eos=True))
            connection.write(ipc.encode(add))
            async with asyncio.timeout(STEP_TIMEOUT_S):
                if not await stepped:
                    raise EngineDiedError("the engine process ended in a step")
    except ModelTooLargeError:
        return
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
