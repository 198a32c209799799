"""A matcher follows one sequence through its constraint: which tokens may come next, and which must."""

import time
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher

from tokenbus.worker.engine.constraints.grammar import ConstraintError

Allowed = np.ndarray[tuple[int], np.dtype[np.bool_]]

_SLOW_S = 0.01
MAX_SLOW_S = 0.5
"""Total CPU time, per sequence, of calls that take longer than `_SLOW_S`. Other sequences wait for them: a sufficiently
ambiguous grammar takes 0.2 s per token, growing with every token, within llguidance's limits."""


_DEAD_END = "NoExtension"
"""llguidance's errors begin like this if nothing may follow, not even the end."""


class SequenceMatcher(Protocol):
    """The state of a constraint after the accepted tokens. Any method may raise ConstraintError."""

    is_ready: bool
    """Whether it knows what may come next. If not, nothing is forced yet, and its sequence must wait."""

    def allowed(self) -> Allowed:
        """Returns, for each token, whether it may come next; at least one may."""
        ...

    def forced(self) -> int | None:
        """Returns the token that must come next; None if there is a choice."""
        ...

    def accept(self, token_id: int) -> None:
        """Takes the next token."""
        ...

    def accept_forced(self, limit: int) -> list[int]:
        """Takes forced tokens, up to the end token and at most `limit`, and returns them."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Waits until it is ready, or for about this long."""
        ...

    def close(self) -> None:
        """Frees its resources. Idempotent."""
        ...


class Matcher:
    """A `SequenceMatcher` in this process, which is always ready."""

    is_ready = True

    def __init__(self, state: LLMatcher, end_token_id: int, vocab_size: int) -> None:
        self._state = state
        self._end_token_id = end_token_id
        self._bits = np.zeros(-(-vocab_size // 32), np.uint32)
        self._vocab_size = vocab_size
        self._slow_s = 0.0
        self._knows_forced = False
        self._forced: int | None = None

    def __repr__(self) -> str:
        return f"<Matcher, {'complete' if self._state.is_accepting() else 'incomplete'}>"

    def copy(self) -> "Matcher":
        """Returns an independent matcher in the same state."""
        return Matcher(self._state.deep_copy(), self._end_token_id, self._vocab_size)

    def allowed(self) -> Allowed:
        return unpacked(self.allowed_bits(), self._vocab_size)

    def allowed_bits(self) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
        """Returns one bit per token, lowest first, in a buffer overwritten by the next call."""
        self._call(self._state.unsafe_compute_mask_ptr, self._bits.ctypes.data, self._bits.nbytes)
        return self._bits

    def forced(self) -> int | None:
        """Does what `SequenceMatcher` says.

        The result depends only on the preceding tokens, so it is the same wherever a sequence is resumed: of several
        tokens forced together, only the first is taken, and the following ones are determined again."""
        if not self._knows_forced:
            self._knows_forced = True
            if self._state.is_stopped():
                self._check()
                self._forced = self._end_token_id
            else:
                tokens = self._call(self._state.compute_ff_tokens)
                self._forced = tokens[0] if tokens else None
        return self._forced

    def accept(self, token_id: int) -> None:
        self._knows_forced = False
        if not (self._state.is_stopped() and token_id == self._end_token_id):
            self._call(self._state.consume_token, token_id)

    def accept_forced(self, limit: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < limit and (token_id := self.forced()) is not None:
            self.accept(token_id)
            taken.append(token_id)
            if token_id == self._end_token_id:
                break
        return taken

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass

    def _call(self, method: Any, *arguments: Any) -> Any:
        # of this thread alone: on a busy machine a call takes longer through no fault of its own
        began = time.thread_time()
        result = method(*arguments)
        seconds = time.thread_time() - began
        if seconds > _SLOW_S:
            self._slow_s += seconds
        self._check()
        return result

    def _check(self) -> None:
        if self._state.is_error():
            problem = self._state.get_error()
            raise ConstraintError("allows no text" if problem.startswith(_DEAD_END) else problem)
        if self._slow_s > MAX_SLOW_S:
            raise ConstraintError("takes too long to follow: make it less ambiguous")


def unpacked(bits: "np.ndarray[tuple[int], Any]", vocab_size: int) -> Allowed:
    """Returns the mask that these bits represent."""
    return np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
