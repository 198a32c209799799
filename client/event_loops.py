"""Clients and streams belong to the event loop in which they were made: in another one they would wait forever."""

import asyncio


def running(owner: str) -> asyncio.AbstractEventLoop:
    """Returns the running event loop. Raises RuntimeError, naming `owner`, if there is none in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(f"{owner} needs a running event loop: use it in a coroutine, or use SyncClient") from None


def require(loop: asyncio.AbstractEventLoop, owner: str) -> None:
    """Raises RuntimeError, naming `owner`, unless this event loop is running in this thread."""
    if running(owner) is not loop:
        ended = ", which has ended" if loop.is_closed() else ""
        raise RuntimeError(
            f"{owner} belongs to another event loop{ended}: make a Client in each loop (asyncio.run starts a new one), "
            "or use SyncClient"
        )
