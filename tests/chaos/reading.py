"""Records a stream as its client reads it: what arrived, whether it is right, and how long the client waited."""

from collections.abc import Iterable, Sequence

import msgspec

from tests.support.exact_client import NEAR_TIE
from tokenbus.protocol.wire import errors

MAX_PROBLEM_CHARS = 400
UNSEALED = "worker_lost, not sealed"
"""A router's `worker_lost` for a stream when the router can't know what the client has read."""
_UNSEALED_TEXT = errors.make_error(errors.Code.WORKER_LOST).message


class Failure(msgspec.Struct, frozen=True):
    """The error in a terminal."""

    code: str
    message: str = ""


class Usage(msgspec.Struct, frozen=True):
    """The part of a terminal's `usage` that is checked."""

    completion_tokens: int = 0


class Piece(msgspec.Struct, frozen=True):
    """One message of a stream."""

    attempt: int = 0
    tokens: int = 0
    text_offset: int = 0
    text: str = ""
    finish_reason: str | None = None
    worker_id: str | None = None
    usage: Usage | None = None
    error: Failure | None = None


class Expected(msgspec.Struct, frozen=True):
    """The text that an undisturbed stream had."""

    text: bytes
    ends: tuple[int, ...]
    """The byte at which each of its tokens ends."""
    near_ties: frozenset[int] = frozenset()
    """The bytes of the text at which another batch, which rounds differently, may continue with another token."""

    @property
    def num_tokens(self) -> int:
        return len(self.ends)

    def first(self, num_tokens: int) -> "Expected":
        """Returns the text of a stream with fewer tokens."""
        ends = self.ends[:num_tokens]
        return Expected(self.text[: ends[-1]], ends, self.near_ties)


def expected_of(tokens: Iterable[tuple[str, Sequence[float]]]) -> Expected:
    """Returns the text of these tokens, each with the log probabilities of the two likeliest ones, or with none.

    Two tokens may begin with the same bytes, so a near tie makes the bytes of the following token uncertain too."""
    text, ends, near_ties, was_near = b"", [], set(), False
    for token, logprobs in tokens:
        is_near = len(logprobs) > 1 and abs(logprobs[0] - logprobs[1]) < NEAR_TIE
        begin, text = len(text), text + token.encode()
        ends.append(len(text))
        if is_near or was_near:
            near_ties |= set(range(begin, len(text)))
        was_near = is_near
    return Expected(text, tuple(ends), frozenset(near_ties))


class Reading:
    """One stream as a client reads it that concatenates texts in the order of arrival.

    A text that begins after the end of what was read leaves a hole. One that begins before that end is a repetition,
    and wrong, unless the worker goes back into a hole, once it has heard that its client had not been there."""

    def __init__(self, expected: Expected, now: float) -> None:
        self.terminal: Piece | None = None
        self.num_tokens = 0
        self.problem = ""
        """The first thing that is wrong with it."""
        self.has_hole = False
        self.has_parted = False
        """Whether it continued with another token at a near tie, so that the rest of its text can't be checked."""
        self.gaps_s: list[float] = []
        """The pauses in its text after which another attempt continued."""
        self.longest_silence_s = 0.0
        self.last_message_at = now
        self._expected = expected
        self._end = 0
        self._holes: list[range] = []
        """The bytes that are missing, and to which the worker has not gone back."""
        self._attempt = 1
        self._text_at = now

    def __repr__(self) -> str:
        error = self.terminal.error if self.terminal else None
        worker = f" at {self.terminal.worker_id}" if self.terminal else ""
        return f"<Reading {self._end} bytes, {self.end}{worker}{f': {error.message}' if error else ''}>"

    @property
    def end(self) -> str | None:
        """The finish reason, or the error's code; None if there is no terminal."""
        if self.terminal is None or self.terminal.error is None:
            return self.terminal and self.terminal.finish_reason
        error = self.terminal.error
        is_unsealed = error == Failure("worker_lost", _UNSEALED_TEXT) and self.terminal.worker_id is None
        return UNSEALED if is_unsealed else error.code

    def add(self, piece: Piece, now: float) -> None:
        self.last_message_at = now
        if self.terminal is not None:
            self._note(f"after {self!r} came {piece}")
            return
        is_new = piece.attempt > self._attempt
        if piece.text:
            self._hear(piece.attempt, now)
        self.num_tokens += piece.tokens
        if piece.text or piece.worker_id is not None:  # a router knows no text offsets
            self._check(piece.text_offset, piece.text.encode(), is_new=is_new)
        if piece.finish_reason is not None:
            self.terminal = piece
            if piece.finish_reason == "length":
                self._check_whole(piece)

    def _hear(self, attempt: int, now: float) -> None:
        silence_s = now - self._text_at
        if attempt > self._attempt and self._end:
            self.gaps_s.append(silence_s)
        self.longest_silence_s = max(self.longest_silence_s, silence_s)
        self._attempt, self._text_at = max(attempt, self._attempt), now

    def _check(self, offset: int, text: bytes, *, is_new: bool) -> None:
        if offset > self._end:
            self.has_hole = True
            self._holes.append(range(self._end, offset))
        elif offset < self._end and not is_new and any(offset in hole for hole in self._holes):
            self._holes = [hole for hole in self._holes if hole.stop <= offset]
        elif offset < self._end:
            self._note(f"at byte {self._end} came again what begins at {offset}: {text!r}")
        right = self._expected.text[offset : offset + len(text)]
        if text != right and not self.has_parted:
            parted_at = next(
                (at for at, (one, other) in enumerate(zip(text, right, strict=False)) if one != other), None
            )
            self.has_parted = parted_at is not None and offset + parted_at in self._expected.near_ties
            if not self.has_parted:
                self._note(f"at byte {offset} came {text!r} in place of {right!r}")
        self._end = offset + len(text)

    def _check_whole(self, terminal: Piece) -> None:
        if self._end != len(self._expected.text) and not self.has_parted:
            self._note(f"it ended at byte {self._end} of {len(self._expected.text)}")
        if terminal.usage is None or terminal.usage.completion_tokens != self._expected.num_tokens:
            self._note(f"its usage was {terminal.usage}, not {self._expected.num_tokens} tokens")

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem[:MAX_PROBLEM_CHARS]
