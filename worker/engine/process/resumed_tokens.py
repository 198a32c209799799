"""Reads the tokens that sequences already have when an engine gets them, a few of each between two steps.

A reasoning budget depends on each token of its answer. Of a long answer that is continued it would take seconds to read
them all at once, for which the streams of all others would stand still."""

import time
from collections.abc import Iterator, Sequence
from itertools import islice

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.chat_format.reasoning_budget import ReasoningBudget, ReasoningCloser
from tokenbus.worker.engine.constraints.matcher import SequenceMatcher
from tokenbus.worker.engine.process import ipc

_READ_S = 0.005
"""The time for reading between two steps. There may be 100,000 tokens, of up to 25 microseconds each."""
_READ_AT_ONCE = 64


class Reading:
    """A sequence whose tokens are being read. The scheduler does not have it yet."""

    def __init__(self, command: ipc.Add, matcher: SequenceMatcher | None, budget: ReasoningBudget) -> None:
        self.command = command
        self.matcher = matcher
        self._budget = budget
        self._failure: Exception | None = None
        token_ids = block_hash.unpack_token_ids(command.token_ids)
        self._unread = iter(token_ids[len(token_ids) - command.num_sampled :])

    def __repr__(self) -> str:
        return f"<Reading of sequence {self.command.seq_no}>"

    def read_some(self) -> bool:
        """Reads the next tokens; returns whether that was all."""
        some = list(islice(self._unread, _READ_AT_ONCE))
        try:
            for token_id in some:
                self._budget.accept(token_id)
        except Exception as error:  # a bug in reading them ends this sequence alone: `take_budget` raises it
            self._failure = error
        return len(some) < _READ_AT_ONCE or self._failure is not None

    def take_budget(self) -> ReasoningBudget:
        """Returns the budget after all tokens. Raises what reading them raised."""
        if self._failure is not None:
            raise self._failure
        return self._budget


class ResumedTokens:
    """The sequences whose tokens are being read, in turn."""

    def __init__(self, closer: ReasoningCloser | None) -> None:
        self._closer = closer
        self._readings: dict[int, Reading] = {}
        """By number; those read last come last."""

    def __repr__(self) -> str:
        return f"<ResumedTokens of {list(self._readings)}>"

    def __len__(self) -> int:
        return len(self._readings)

    @property
    def commands(self) -> Sequence[ipc.Add]:
        """The commands that brought them."""
        return [one.command for one in self._readings.values()]

    def new_budget(self, command: ipc.Add) -> ReasoningBudget | None:
        """Returns a sequence's budget before all of its tokens, if it has one."""
        limit = command.reasoning_limit
        return None if limit is None or self._closer is None else ReasoningBudget(self._closer, limit)

    def add(self, command: ipc.Add, matcher: SequenceMatcher | None, budget: ReasoningBudget) -> None:
        """Begins to read a sequence's tokens."""
        self._readings[command.seq_no] = Reading(command, matcher, budget)

    def abort(self, seq_no: int) -> bool:
        """Gives a sequence up; returns whether it was here."""
        reading = self._readings.pop(seq_no, None)
        if reading is not None and reading.matcher is not None:
            reading.matcher.close()
        return reading is not None

    def read(self) -> Iterator[Reading]:
        """Reads for as long as all others may stand still; yields what has been read to its end."""
        until = time.monotonic() + _READ_S
        while self._readings and time.monotonic() < until:
            seq_no = next(iter(self._readings))
            reading = self._readings.pop(seq_no)
            if reading.read_some():
                yield reading
            else:
                self._readings[seq_no] = reading
