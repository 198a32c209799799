"""Bounds what answers about the system cost: nobody who only looks may delay those who generate.

What is served, and how requests went, may be asked by everybody, as often as they like, and some answers take
milliseconds of the one event loop in which a router or gateway does everything. So each answer is paid for with the
time that it took. Every caller has an account that is paid back all the time, and so have all of them together; whoever
has overdrawn is told when to ask again. An answer is paid for afterwards, so a cheap question is never refused for what
it might have cost.

A caller is an API key or, where there are none, a connection, by the beginning of its inboxes: a console, a `top` and a
user that ask over connections of their own have accounts of their own. Over HTTP it is an address, in place of a
connection."""

import functools
import math

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import errors, subjects

CALLER_SHARE = 0.05
"""Share of a core that the answers to one caller may take in the long run."""
CALLER_BURST_S = 0.25
"""Seconds of computing that a caller may be ahead."""
TOTAL_SHARE = 0.2
"""The same for all callers together."""
TOTAL_BURST_S = 0.5
LEAST_S = 100e-6
"""The least that an answer counts: receiving the question and sending the answer take time too."""
_TTL_S = CALLER_BURST_S / CALLER_SHARE + 60.0
MAX_CALLERS = 4_096
_STEP_S = 0.05
"""Waits are told in steps of this, so that most refusals are like an earlier one."""
_INBOX_TOKENS = 2
"""The tokens that all inboxes of one connection begin with, of those that have more."""


class _Account:
    """A debt of computing time, which shrinks by a share of the time that passes."""

    __slots__ = ("_at", "_burst_s", "_owed_s", "_share")

    def __init__(self, share: float, burst_s: float) -> None:
        self._share = share
        self._burst_s = burst_s
        self._owed_s = 0.0
        self._at = 0.0

    def wait_s(self, now: float) -> float:
        """Returns how long to wait until more may be taken; 0 if it may be now."""
        return max(0.0, (self._owed(now) - self._burst_s) / self._share)

    def take(self, seconds: float, now: float) -> None:
        self._owed_s, self._at = self._owed(now) + seconds, now

    def _owed(self, now: float) -> float:
        return max(0.0, self._owed_s - (now - self._at) * self._share)


class Inquiries:
    """The accounts of those who ask one process. All times are in seconds of one monotonic clock."""

    def __init__(self, asked: str) -> None:
        """`asked` is what errors call the process."""
        self._asked = asked
        self._callers: TTLCache[_Account] = TTLCache(_TTL_S, MAX_CALLERS)
        self._all = _Account(TOTAL_SHARE, TOTAL_BURST_S)
        self.num_refused = 0

    def __repr__(self) -> str:
        return f"<Inquiries of {len(self._callers)} callers, {self.num_refused} refused>"

    def refusal(self, caller: str, now: float) -> errors.Error | None:
        """Returns the error for a caller if it, or all of them together, have taken too much."""
        account = self._callers.get(caller, now)
        own_s, all_s = 0.0 if account is None else account.wait_s(now), self._all.wait_s(now)
        if not own_s and not all_s:
            return None
        self.num_refused += 1
        return _refusal(self._asked, bool(own_s), math.ceil(max(own_s, all_s) / _STEP_S))

    def check(self, caller: str, now: float) -> None:
        """Raises RequestError(overloaded) in the same case."""
        if (error := self.refusal(caller, now)) is not None:
            raise errors.RequestError(error)

    def pay(self, caller: str, seconds: float, now: float) -> None:
        """Records that answering a caller took some time, which ends now."""
        account = self._callers.get(caller, now)
        if account is None:
            account = _Account(CALLER_SHARE, CALLER_BURST_S)
        self._callers.put(caller, account, now)
        account.take(max(seconds, LEAST_S), now)
        self._all.take(max(seconds, LEAST_S), now)


@functools.lru_cache(1_024)
def _refusal(asked: str, is_own: bool, num_steps: int) -> errors.Error:
    words = f"you ask more than {asked} answers" if is_own else f"{asked} is asked more than it answers"
    wait_ms = 1e3 * _STEP_S * num_steps
    return errors.make_error(errors.Code.OVERLOADED, f"{words}: ask less often", retry_after_ms=wait_ms)


def caller_of(who: subjects.ModelAddress, reply: str) -> str:
    """Names who asks: by its key or, without one, by its connection."""
    if who.key_id:
        return f"key {who.key_id}"
    tokens = reply.split(".", _INBOX_TOKENS)
    return f"{who.tenant} {'.'.join(tokens[:_INBOX_TOKENS])}"
