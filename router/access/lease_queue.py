"""The order in which a router asks for leases, several at a time.

What requests wait for comes first, in the order of its arrival, and each of them waits for the answers about its own
shares only. No share is leased twice at the same time."""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tokenbus.protocol import tasks
from tokenbus.router.access.limits import Account

_AT_ONCE = 32
_OTHERS_TURN = 4
"""One in so many leases is one that no request waits for, such as a renewal, while there are both."""


class LeaseQueue:
    """The leases that one router wants."""

    def __init__(self, wanted: dict[Account, None], lease: Callable[[Account], Coroutine[Any, Any, None]]) -> None:
        """`wanted` are the shares of which more is to be leased; `lease` asks for it."""
        self._wanted = wanted
        self._lease = lease
        self._urgent: dict[Account, None] = {}
        """Those that requests wait for."""
        self._asking: dict[Account, asyncio.Task[None]] = {}
        self._answers: dict[Account, asyncio.Future[None]] = {}
        """Done when the next lease of a share is answered, for requests that wait for it."""
        self._num_asked = 0

    def __repr__(self) -> str:
        return f"<LeaseQueue, {len(self._asking)} being asked for>"

    def start_some(self) -> None:
        """Begins to ask for what is wanted, as far as not too many leases are being asked for."""
        while len(self._asking) < _AT_ONCE and (account := self._next()) is not None:
            self._num_asked += 1
            task = self._asking[account] = tasks.background("lease a limit", self._lease(account))
            task.add_done_callback(functools.partial(self._answered, account))

    async def wait_for(self, accounts: Sequence[Account], until: float) -> None:
        """Waits until the leases of some shares are answered, or until a time of the monotonic clock."""
        for account in accounts:
            if account in self._wanted:
                del self._wanted[account]
                self._urgent[account] = None
            elif account not in self._asking and account not in self._urgent:
                continue  # it has been answered already
            if account not in self._answers:
                self._answers[account] = asyncio.get_running_loop().create_future()
        self.start_some()
        answers = [answer for account in accounts if (answer := self._answers.get(account)) is not None]
        if answers:
            await asyncio.wait(answers, timeout=max(0.0, until - time.monotonic()))

    def _next(self) -> Account | None:
        queues = [self._urgent, self._wanted]
        if self._num_asked % _OTHERS_TURN == 0:
            queues.reverse()
        for queue in queues:
            for account in queue:  # passes over few: at most those that are being asked for
                if account not in self._asking:
                    del queue[account]
                    return account
        return None

    def _answered(self, account: Account, task: asyncio.Task[None]) -> None:
        del self._asking[account]
        if task.cancelled():  # this process ends
            return
        if (answer := self._answers.pop(account, None)) is not None:
            answer.set_result(None)
        self.start_some()
