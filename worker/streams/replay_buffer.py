"""Keeps the text and tokens of a stream, so that any part can be published again.

Text, reasoning and the arguments of tool calls are a track each: its bytes, and where in them each token ends:

    token       0    1    2    3
    text        né   -    😀!  ?        token 1 is half of 😀, whose text comes with token 2
    ends        3    3    8    9        in bytes of UTF-8

The arguments of all calls are concatenated. A list says where each call begins.

Log probabilities are packed for other workers. Each token takes a record of 12 bytes for itself and one for each of the
likeliest tokens at its position, so that packed tokens can be put together, and cut apart, without being read:

    token 0: own | likeliest | second | ...     token 1: own | likeliest | ...     a record: id (4 bytes) | logprob (8)
"""

import bisect
import functools
import itertools
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET

from tokenbus.protocol.wire import block_hash, messages
from tokenbus.worker.contract import engine_output


@functools.cache
def _logprob_record(num_alternatives: int) -> struct.Struct:
    return struct.Struct("<" + "Id" * (1 + num_alternatives))


def logprob_bytes(num_alternatives: int) -> int:
    """Returns the size of a token with that many alternatives."""
    return _logprob_record(num_alternatives).size


def pack_logprobs(logprobs: Iterable[engine_output.Logprob], num_alternatives: int) -> bytes:
    """Packs log probabilities, with the likeliest `num_alternatives` of each. Raises struct.error if one has fewer."""
    pack_token = _logprob_record(num_alternatives).pack
    return b"".join(
        [
            pack_token(one.token_id, one.logprob, *itertools.chain.from_iterable(one.top[:num_alternatives]))
            for one in logprobs
        ]
    )


def unpack_logprobs(data: bytes, num_alternatives: int) -> list[engine_output.Logprob]:
    """Reverses `pack` for tokens with `num_alternatives` each."""
    return [
        engine_output.Logprob(token_id, logprob, list(zip(rest[::2], rest[1::2], strict=True)))
        for token_id, logprob, *rest in _logprob_record(num_alternatives).iter_unpack(data)
    ]


def unpack_foreign_logprobs(data: bytes, num_alternatives: int) -> list[engine_output.Logprob]:
    """Unpacks what another worker says that it has packed. Raises ValueError if that can't be."""
    if len(data) % logprob_bytes(num_alternatives):
        raise ValueError(f"{len(data)} bytes are not log probabilities with {num_alternatives} alternatives each")
    logprobs = unpack_logprobs(data, num_alternatives)
    # no probability is above 1; written so that NaN is refused
    if not all(logprob <= 0 for one in logprobs for _, logprob in ((one.token_id, one.logprob), *one.top)):
        raise ValueError("a log probability is above 0")
    return logprobs


_JSON_GROWTH = 6
"""A control character of one byte becomes six bytes of JSON."""
_TOKEN_ID_BYTES = 11
"""The largest token id in JSON, with its comma."""
_LOGPROB_BYTES = 2_700
"""A log probability in JSON, with the text and the bytes of a token of 256 bytes."""
_CALL_BYTES = 200
"""A delta of a tool call in JSON, without its id, its name and its arguments."""


_CHUNK_BYTES = 1_024
"""All else of a chunk with text, most of it the id."""


class Segment(NamedTuple):
    """Consecutive tokens of a completion, with what came with them."""

    offset: int
    num_tokens: int
    text_offset: int
    text: str
    token_ids: list[int]
    logprobs: list[engine_output.Logprob]
    """One per token if the request asked for them, else empty."""
    reasoning_offset: int = 0
    reasoning: str = ""
    tool_calls: tuple[messages.ToolCallDelta, ...] = ()


class _Track:
    """Bytes of UTF-8, and the end of each token in them."""

    __slots__ = ("data", "ends")

    def __init__(self, num_tokens: int = 0) -> None:
        self.data = bytearray()
        self.ends = array("I", bytes(4 * num_tokens))

    def append(self, num_tokens: int, text: str) -> None:
        """Adds tokens, or more text to the last one. Tokens that arrive together share their text, which belongs to the
        last of them."""
        start = len(self.data)
        self.data += text.encode()
        ends = self.ends
        if num_tokens == 1:  # nearly always
            ends.append(len(self.data))
            return
        for _ in range(num_tokens):
            ends.append(start)
        if ends:
            ends[-1] = len(self.data)

    def extend(self, texts: Sequence[str]) -> None:
        """Adds a token for each text."""
        for text in texts:
            self.data += text.encode()
            self.ends.append(len(self.data))

    def offset(self, token: int) -> int:
        """Returns where a token begins."""
        return self.ends[token - 1] if token else 0

    def text(self, start: int, stop: int) -> str:
        """Returns the text of the tokens from `start` up to `stop`."""
        return self.data[self.offset(start) : self.offset(stop)].decode()


class _Call(NamedTuple):
    """A tool call of the answer."""

    token: int
    """The token with which it began."""
    start: int
    """Where its arguments begin in those of all calls."""
    id: str
    name: str


class ReplayBuffer:
    """The text and token ids of one completion. Offsets count tokens, text offsets count bytes of UTF-8.

    A token's text is what could be published when it was sampled: nothing if it was held back, more than its own if it
    completed an earlier token's character. With `num_alternatives`, the log probability of each token is kept, and
    those of that many of the likeliest others."""

    def __init__(self, num_alternatives: int | None = None) -> None:
        self._text = _Track()
        self._reasoning: _Track | None = None
        self._arguments: _Track | None = None
        """Both exist once the answer has any."""
        self._calls: list[_Call] = []
        self.token_ids = array("I")
        self._num_alternatives = num_alternatives
        self._logprobs = bytearray()
        """Packed, of all tokens from `first` on."""
        self.first = 0
        """The first token that can be published again."""

    def __repr__(self) -> str:
        return f"<ReplayBuffer of {self.num_tokens} tokens>"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """The place behind the last token, and behind what came after that."""
        return len(self._text.ends)

    @property
    def num_calls(self) -> int:
        """The number of tool calls that have begun."""
        return len(self._calls)

    @property
    def memory_bytes(self) -> int:
        """Memory that the buffer takes, in bytes."""
        tracks = sum(len(track.data) + 4 * len(track.ends) for track in self._tracks)
        calls = sum(300 + len(call.id) + len(call.name) for call in self._calls)
        return tracks + calls + 4 * len(self.token_ids) + len(self._logprobs)

    def append_resumed(
        self,
        token_ids: Sequence[int],
        texts: Sequence[str],
        logprobs: Sequence[engine_output.Logprob] = (),
        parts: Mapping[int, engine_output.AnswerParts] | None = None,
    ) -> None:
        """Adds what another worker has published: tokens, their texts, what else came with some of them, and the log
        probabilities of the last ones. If log probabilities are kept, the tokens before those can't be published
        again."""
        assert not self.token_ids, self
        if not parts:  # there may be 100,000 tokens
            self.token_ids.extend(token_ids)
            self._text.extend(texts)
        for place, token_id in enumerate(token_ids) if parts else ():
            self._append_parts(1, *(parts or {}).get(place, ("", ())))
            self.token_ids.append(token_id)
            self._text.append(1, texts[place])
        if self._num_alternatives is not None:
            self.first = len(token_ids) - len(logprobs)
            self._logprobs += self.pack(logprobs)

    def text_offset(self, offset: int) -> int:
        """Returns where the text of token `offset` begins."""
        return self._text.offset(offset)

    def append(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[engine_output.Logprob] = (),
        reasoning: str = "",
        tool_calls: Sequence[engine_output.ToolCallPart] = (),
    ) -> None:
        """Adds what was sampled. What comes without a token is the completion's end."""
        packed = self.pack(logprobs)
        assert self._num_alternatives is None or len(logprobs) == len(token_ids), (logprobs, token_ids)
        self._logprobs += packed
        if reasoning or tool_calls or self._reasoning is not None or self._arguments is not None:
            self._append_parts(len(token_ids) or 1, reasoning, tool_calls)
        self.token_ids.extend(token_ids)
        self._text.append(len(token_ids) or 1, text)

    def append_text(self, token_ids: Sequence[int], text: str) -> None:
        """Adds at least one token, with nothing but text, where no log probabilities are kept."""
        if self._reasoning is not None or self._arguments is not None:
            self._append_parts(len(token_ids), "", ())
        self.token_ids.extend(token_ids)
        self._text.append(len(token_ids), text)

    def pack(self, logprobs: Sequence[engine_output.Logprob]) -> bytes:
        """Returns log probabilities in packed form, if they are kept."""
        return b"" if self._num_alternatives is None else pack_logprobs(logprobs, self._num_alternatives)

    def plain_text(self, start: int, max_bytes: int) -> tuple[int, int, str] | None:
        """Returns how many tokens there are from `start` on, where their text begins, and that text; None if there is
        none, if there is anything but text, or if that might not fit in `max_bytes` of JSON."""
        count = len(self.token_ids) - start
        if not count or self._reasoning is not None or self._arguments is not None:
            return None
        at = self._text.ends[start - 1] if start else 0
        data = self._text.data[at:]
        return (count, at, data.decode()) if _JSON_GROWTH * len(data) + _CHUNK_BYTES <= max_bytes else None

    def segments(self, offset: int, max_bytes: int, end: int | None = None) -> Iterator[Segment]:
        """Yields the tokens from `offset` up to `end`, in segments of at most `max_bytes` of JSON or of one token.

        Starts later if the first ones can't be published again."""
        start, end = max(offset, self.first), self.num_tokens if end is None else min(end, self.num_tokens)
        while start < end:
            stop = self._last_that_fits(start, end, max_bytes)
            yield self.segment(start, stop)
            start = stop

    def segment(self, start: int, stop: int) -> Segment:
        """Returns the tokens from `start` up to `stop`."""
        assert start >= self.first, "its first tokens can't be published again"
        ids, packed = self.token_ids[start:stop].tolist(), self.packed_logprobs(start, stop)
        logprobs = unpack_logprobs(packed, self._num_alternatives or 0)
        plain = Segment(start, len(ids), self._text.offset(start), self._text.text(start, stop), ids, logprobs)
        if self._reasoning is not None:
            plain = plain._replace(
                reasoning_offset=self._reasoning.offset(start), reasoning=self._reasoning.text(start, stop)
            )
        return plain if self._arguments is None else plain._replace(tool_calls=tuple(self._deltas(start, stop)))

    def packed_token_ids(self, start: int, stop: int) -> bytes:
        """Returns the token ids from `start` up to `stop` in wire format."""
        return block_hash.pack_token_ids(self.token_ids[start:stop])

    def packed_logprobs(self, start: int, stop: int) -> bytes:
        """Returns the log probabilities of the tokens from `start` up to `stop` in packed form, if they are kept."""
        if self._num_alternatives is None:
            return b""
        first, end = max(0, start - self.first), max(0, stop - self.first)
        token_bytes = logprob_bytes(self._num_alternatives)
        return bytes(self._logprobs[first * token_bytes : end * token_bytes])

    @property
    def _tracks(self) -> list[_Track]:
        return [track for track in (self._text, self._reasoning, self._arguments) if track is not None]

    def _append_parts(self, num_tokens: int, reasoning: str, tool_calls: Sequence[engine_output.ToolCallPart]) -> None:
        """Adds what came with tokens, before the tokens themselves are added."""
        if reasoning and self._reasoning is None:
            self._reasoning = _Track(self.num_tokens)
        if self._reasoning is not None:
            self._reasoning.append(num_tokens, reasoning)
        if tool_calls and self._arguments is None:
            self._arguments = _Track(self.num_tokens)
        if self._arguments is None:
            return
        self._arguments.append(num_tokens, "")
        for part in tool_calls:
            if part.call == len(self._calls):
                last = max(0, self.num_tokens + num_tokens - 1)
                self._calls.append(_Call(last, len(self._arguments.data), part.id, part.name))
            assert part.call == len(self._calls) - 1, part  # only the last call can continue
            self._arguments.append(0, part.arguments)

    def _deltas(self, start: int, stop: int) -> Iterator[messages.ToolCallDelta]:
        """Yields the parts of tool calls that came with the tokens from `start` up to `stop`."""
        assert self._arguments is not None
        arguments, calls = self._arguments, self._calls
        first_byte, end_byte = arguments.offset(start), arguments.offset(stop)
        # the call that may continue, and those that begin
        begin = bisect.bisect_left(calls, start, key=lambda call: call.token)
        for index in range(max(0, begin - 1), bisect.bisect_left(calls, stop, key=lambda call: call.token)):
            call, is_new = calls[index], index >= begin
            ends = calls[index + 1].start if index + 1 < len(calls) else len(arguments.data)
            since, until = max(first_byte, call.start), min(end_byte, ends)
            if is_new or since < until:
                name = (call.name if is_new else "") or UNSET
                yield messages.ToolCallDelta(
                    index=index,
                    id=(call.id if is_new else "") or UNSET,
                    type="function" if name else UNSET,
                    arguments_offset=since - call.start,
                    function=messages.FunctionDelta(name=name, arguments=arguments.data[since:until].decode()),
                )

    def _last_that_fits(self, start: int, end: int, max_bytes: int) -> int:
        """Returns the end of the longest segment from `start` that fits, at least one token; a binary search."""
        low, high = start + 1, end
        num_logprobs = 0 if self._num_alternatives is None else 1 + self._num_alternatives
        token_bytes = _TOKEN_ID_BYTES + _LOGPROB_BYTES * num_logprobs
        first_call = bisect.bisect_left(self._calls, start, key=lambda call: call.token)
        while low < high:
            middle = (low + high + 1) // 2
            # an upper bound, since exact sizes would require encoding every candidate
            text_bytes = sum(track.offset(middle) - track.offset(start) for track in self._tracks)
            calls = self._calls[first_call : bisect.bisect_left(self._calls, middle, key=lambda call: call.token)]
            call_bytes = sum(_CALL_BYTES + _JSON_GROWTH * (len(call.id) + len(call.name)) for call in calls)
            size = _JSON_GROWTH * text_bytes + token_bytes * (middle - start) + call_bytes
            low, high = (middle, high) if size <= max_bytes else (low, middle - 1)
        return low
