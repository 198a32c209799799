"""Retries when the Hub is busy, fails temporarily, or the connection is lost."""

import time
from collections.abc import Callable
from typing import TypeVar

import httpx2
from huggingface_hub import errors as hub_errors

_MAX_TRIES = 8
"""The number of consecutive tries that may make no progress."""
_MAX_WAIT_S = 8.0
_MAX_ASKED_WAIT_S = 60.0
"""The longest wait that a server may ask for; asking for more is an error, which says so."""
_FIRST_WAIT_S = 0.2
_TRANSIENT = (408, 429, 500, 502, 503, 504)
ResultT = TypeVar("ResultT")


class Tries:
    """Counts consecutive tries that made no progress."""

    def __init__(self) -> None:
        self._failed = 0

    def __repr__(self) -> str:
        return f"<Tries: {self._failed} failed>"

    def succeeded(self) -> None:
        self._failed = 0

    def wait_after(self, error: Exception) -> None:
        """Waits before another try. Re-raises the error if it is not retryable or the retries are used up."""
        self._failed += 1
        asked_s = _asked_wait_s(error)
        if not _is_transient(error) or self._failed >= _MAX_TRIES or asked_s > _MAX_ASKED_WAIT_S:
            raise error
        time.sleep(asked_s or min(_MAX_WAIT_S, _FIRST_WAIT_S * 2 ** (self._failed - 1)))


def until_answered(ask: Callable[[], ResultT]) -> ResultT:
    """Returns the result of `ask`, retrying while that makes sense."""
    tries = Tries()
    while True:
        try:
            return ask()
        except (httpx2.TransportError, hub_errors.HfHubHTTPError) as error:
            if isinstance(error, httpx2.ConnectError):  # the Hub is unreachable: the cache may be enough
                raise
            tries.wait_after(error)


def _is_transient(error: Exception) -> bool:
    if isinstance(error, hub_errors.HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    return isinstance(error, httpx2.TransportError)


def _asked_wait_s(error: Exception) -> float:
    """Returns the seconds in `Retry-After`; 0 if absent."""
    asked = error.response.headers.get("Retry-After", "") if isinstance(error, hub_errors.HfHubHTTPError) else ""
    return float(asked) if asked.isdigit() else 0.0
