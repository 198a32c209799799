"""Opens files that somebody has named: never one that would make this process wait, or read without end.

The name may be that of a pipe, a device, or a file on a mount that does not answer. A pipe that nobody writes to opens
at once without blocking, and is then seen to be one. Whoever must not wait, like an event loop, opens on a thread."""

import asyncio
import contextlib
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from tokenbus.worker.contract.engine_errors import ModelError

ResultT = TypeVar("ResultT")

MAX_ADAPTER_BYTES = 4 << 30
"""The most bytes of an adapter's file: one of rank 256 for a model of 70B parameters has 3.3 GB."""
MAX_CONFIG_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 64 << 20
OPEN_TIMEOUT_S = 10.0
"""Time for a mount to answer."""
MAX_WAITING = 8
"""Threads that may wait for mounts that do not answer: nothing can end them."""
_waiting = threading.Semaphore(MAX_WAITING)


def open_regular(path: str | Path, *, or_folder: bool = False) -> int:
    """Opens a file to read it, or with `or_folder` a folder. Raises ModelError, naming the problem, for anything
    else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror}") from error
    except ValueError as error:  # a null in its name
        raise ModelError(f"{path}: can't be read: {error}") from error
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or (or_folder and stat.S_ISDIR(mode)):
        return fd
    os.close(fd)
    raise ModelError(f"{path}: is no regular file")


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """Reads a whole file of at most `max_bytes`. Raises ModelError, naming the problem."""
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise ModelError(f"{path}: can't be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ModelError(f"{path}: has more than {max_bytes >> 20:,} MiB")
    return data


def on_daemon_thread(function: Callable[[], ResultT]) -> "asyncio.Future[ResultT]":
    """Calls a function on a thread of its own, which does not keep this process from ending. The result is a ModelError
    if no thread can be started."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ResultT] = loop.create_future()

    def tell(result: ResultT | None, problem: Exception | None) -> None:
        if done.done():
            return  # cancelled
        if problem is not None:
            done.set_exception(problem)
        else:
            done.set_result(cast(ResultT, result))

    def call() -> None:
        result, problem = None, None
        try:
            result = function()
        except Exception as error:  # outermost frame of a thread
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(tell, result, problem)

    try:
        threading.Thread(target=call, name="files", daemon=True).start()
    except RuntimeError as error:
        done.set_exception(ModelError(f"no thread can be started to read the files: {error}"))
    return done


async def on_thread(
    path: str | Path,
    function: Callable[[], ResultT],
    discard: Callable[[ResultT], None],
    timeout_s: float = OPEN_TIMEOUT_S,
) -> ResultT:
    """Calls a function that opens `path` on a thread that does not keep this process from ending. What comes when
    nobody waits for it any more is given to `discard`.

    Raises ModelError if that takes too long, or if too many such calls have not returned yet."""
    if not _waiting.acquire(blocking=False):
        raise ModelError(f"{path}: {MAX_WAITING} other files are on mounts that do not answer")

    def call() -> ResultT:
        try:
            return function()
        finally:
            _waiting.release()

    def drop(done: "asyncio.Future[ResultT]") -> None:
        if done.exception() is None:
            discard(done.result())

    opening = on_daemon_thread(call)
    if opening.done():  # no thread has been started
        _waiting.release()
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(opening)
    except TimeoutError as error:
        opening.add_done_callback(drop)
        raise ModelError(f"{path}: the file system does not answer within {timeout_s:g} s") from error
    except asyncio.CancelledError:
        opening.add_done_callback(drop)
        raise
