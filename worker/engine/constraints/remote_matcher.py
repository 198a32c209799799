"""A matcher whose constraint is followed by another process, so that only its own sequence waits for it."""

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from tokenbus.worker.engine.constraints import messages
from tokenbus.worker.engine.constraints.grammar import ConstraintError
from tokenbus.worker.engine.constraints.matcher import Allowed, unpacked
from tokenbus.worker.engine.constraints.processes import ConstraintProcess

_PATIENCE_S = 0.005
"""The time that a step waits for a follower. Most need a tenth of a millisecond."""
_MAX_PATIENCE_S = 0.25
"""The total time that steps wait for one follower. After that its sequence skips the steps for which it is late."""
_DIED = "takes too much time or memory to follow: make it smaller or less ambiguous"


class RemoteMatcher:
    """A `SequenceMatcher` for one process that follows a constraint.

    The process says in advance which tokens are forced and which may follow them. It is sent each token that is not
    forced, and then computes while the model does."""

    def __init__(self, process: ConstraintProcess, vocab_size: int, on_close: Callable[[], None]) -> None:
        self._process = process
        self._vocab_size = vocab_size
        self._on_close = on_close
        self._forced: deque[int] = deque()
        self._mask = b""
        self._problem: str | None = None
        self._patience_s = _MAX_PATIENCE_S
        self._is_closed = False
        self.is_ready = False

    def __repr__(self) -> str:
        return f"<RemoteMatcher {'ready' if self.is_ready else 'waiting'}, {self._process!r}>"

    def allowed(self) -> Allowed:
        self._check()
        assert not self._forced, self
        return unpacked(np.frombuffer(self._mask, np.uint8), self._vocab_size)

    def forced(self) -> int | None:
        self._check()
        return self._forced[0] if self._forced else None

    def accept(self, token_id: int) -> None:
        """Takes the next token; never waits."""
        self._check()
        if not self._forced:
            self._ask(token_id)
            return
        if token_id != self._forced.popleft():
            raise ConstraintError("another token is forced")
        if not self._forced and not self._mask:
            self._ask(None)

    def accept_forced(self, limit: int) -> list[int]:
        """Takes those known within a few milliseconds; the others stay forced."""
        self._be_patient()
        taken: list[int] = []
        while len(taken) < limit and self._forced:
            taken.append(self._forced[0])
            self.accept(taken[-1])
        return taken

    def wait(self, timeout_s: float | None) -> None:
        """None waits as long as it takes: the process is killed if that is too long."""
        if self.is_ready:
            return
        try:
            report = self._process.receive(timeout_s)
        except EOFError:
            report = messages.Failed(_DIED)
        match report:
            case messages.MatcherState(forced, mask):
                self._forced, self._mask, self.is_ready = deque(forced), mask, True
            case messages.Failed(problem):
                self._problem, self.is_ready = problem, True

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._process.close()
            self._on_close()

    def _be_patient(self) -> None:
        if self.is_ready or self._patience_s <= 0:
            return
        began = time.monotonic()
        self.wait(min(_PATIENCE_S, self._patience_s))
        waited_s = time.monotonic() - began
        if waited_s > _PATIENCE_S / 5:
            self._patience_s -= waited_s

    def _ask(self, token_id: int | None) -> None:
        self.is_ready = False
        try:
            self._process.send(messages.Next(token_id))
        except EOFError:  # the next `wait` finds out the same
            return

    def _check(self) -> None:
        if self._problem is not None:
            raise ConstraintError(self._problem)
