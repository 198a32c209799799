"""Keeps the text and tokens of a stream, so that any part can be published again; pure.

One entry per token says where its text ends:

    token       0    1    2    3
    text        né   -    😀!  ?        token 1 is half of 😀, whose text comes with token 2
    text_ends   3    3    8    9        in bytes of UTF-8
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenbus.protocol.wire import block_hash
from tokenbus.worker import contract

_JSON_GROWTH = 6
"""A control character of one byte becomes six bytes of JSON."""
_TOKEN_ID_BYTES = 11
"""The largest token id in JSON, with its comma."""
_LOGPROB_BYTES = 2_700
"""A log probability in JSON, with the text and the bytes of a token of 256 bytes."""


class Segment(NamedTuple):
    """Consecutive tokens of a completion, with the text that came with them."""

    offset: int
    num_tokens: int
    text_offset: int
    text: str
    token_ids: list[int]
    logprobs: list[contract.Logprob]
    """One per token if the request asked for them, else empty."""


class ReplayBuffer:
    """The text and token ids of one completion. Offsets count tokens, text offsets count bytes of UTF-8.

    A token's text is what could be published when it was sampled: nothing if it was held back, and more than its own if
    it completed an earlier token's character. `num_logprobs` are kept for each token: its own and the likeliest
    others."""

    def __init__(self, num_logprobs: int = 0) -> None:
        self._text = bytearray()
        self._text_ends = array("I")
        self._token_ids = array("I")
        self._num_logprobs = num_logprobs
        self._first = 0
        """The first token that can be published again."""
        self._logprob_ids = array("I")
        self._logprobs = array("d")

    def __repr__(self) -> str:
        return f"<ReplayBuffer of {self.num_tokens} tokens, {len(self._text)} bytes>"

    @property
    def num_tokens(self) -> int:
        return len(self._text_ends)

    @property
    def text_bytes(self) -> int:
        return len(self._text)

    @property
    def memory_bytes(self) -> int:
        """Memory that the buffer takes, in bytes."""
        return len(self._text) + 8 * len(self._text_ends) + 12 * len(self._logprobs)

    def append_resumed(
        self, token_ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[contract.Logprob] = ()
    ) -> None:
        """Adds what another worker has published: tokens, the text of each, and the log probabilities of the last ones.
        If those are kept, the tokens before can't be published again."""
        assert not self._token_ids, self
        for text in texts:
            self._text += text.encode()
            self._text_ends.append(len(self._text))
        self._token_ids.extend(token_ids)
        if self._num_logprobs:
            self._first = len(token_ids) - len(logprobs)
            for one in logprobs:
                self._append_logprob(one)

    def text_offset(self, offset: int) -> int:
        """Returns where the text of token `offset` begins."""
        return self._text_ends[offset - 1] if offset else 0

    def append(self, token_ids: Sequence[int], text: str, logprobs: Sequence[contract.Logprob] = ()) -> None:
        """Adds what was sampled and published next; text without a token belongs to the last token."""
        if self._num_logprobs:
            assert len(logprobs) == len(token_ids), (logprobs, token_ids)
            for one in logprobs:
                self._append_logprob(one)
        start = len(self._text)
        self._text += text.encode()
        # tokens that came together share their text: it belongs to the last of them
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self._text_ends.append(start)
        if self._text_ends:
            self._text_ends[-1] = len(self._text)

    def all(self) -> Segment:
        """Returns the whole completion as one segment."""
        assert not self._first, "its first tokens can't be published again"
        text = self._text.decode()
        return Segment(0, self.num_tokens, 0, text, list(self._token_ids), self.logprobs(0, self.num_tokens))

    def segments(self, offset: int, max_bytes: int, end: int | None = None) -> Iterator[Segment]:
        """Yields the tokens from `offset` up to `end`, in segments of at most `max_bytes` of JSON or of one token.

        It begins later if the first ones can't be published again."""
        start, end = max(offset, self._first), self.num_tokens if end is None else min(end, self.num_tokens)
        while start < end:
            stop = self._last_that_fits(start, end, max_bytes)
            yield self.segment(start, stop)
            start = stop

    def _last_that_fits(self, start: int, end: int, max_bytes: int) -> int:
        """Returns the end of the longest segment from `start` that fits, at least one token; a binary search."""
        low, high = start + 1, end
        text_start = self.text_offset(start)
        while low < high:
            middle = (low + high + 1) // 2
            token_bytes = _TOKEN_ID_BYTES + _LOGPROB_BYTES * self._num_logprobs
            # an upper bound, since exact sizes would mean encoding every candidate
            size = _JSON_GROWTH * (self._text_ends[middle - 1] - text_start) + token_bytes * (middle - start)
            low, high = (middle, high) if size <= max_bytes else (low, middle - 1)
        return low

    def segment(self, start: int, stop: int) -> Segment:
        """Returns the tokens from `start` up to `stop`, at least one."""
        text_start, text_end = self.text_offset(start), self._text_ends[stop - 1]
        text = self._text[text_start:text_end].decode()
        ids = list(self._token_ids[start:stop])
        return Segment(start, stop - start, text_start, text, ids, self.logprobs(start, stop))

    def packed_token_ids(self, start: int, stop: int) -> bytes:
        """Returns the token ids from `start` up to `stop` in the form in which they are sent."""
        return block_hash.pack_token_ids(self._token_ids[start:stop])

    def logprobs(self, start: int, stop: int) -> list[contract.Logprob]:
        """Returns the log probabilities of the tokens from `start` up to `stop`, if they are kept."""
        width = self._num_logprobs
        found = []
        first = max(0, start - self._first)
        for at in range(first * width, (stop - self._first) * width, width) if width else ():
            pairs = list(zip(self._logprob_ids[at : at + width], self._logprobs[at : at + width], strict=True))
            found.append(contract.Logprob(*pairs[0], top=pairs[1:]))
        return found

    def _append_logprob(self, one: contract.Logprob) -> None:
        alternatives = one.top[: self._num_logprobs - 1]
        assert len(alternatives) == self._num_logprobs - 1, one
        self._logprob_ids.append(one.token_id)
        self._logprobs.append(one.logprob)
        for token_id, logprob in alternatives:
            self._logprob_ids.append(token_id)
            self._logprobs.append(logprob)
