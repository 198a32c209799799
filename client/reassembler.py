"""Orders the chunks of a stream: takes what continues it, cuts off what is known, notices what is missing; pure."""

from typing import NamedTuple

from msgspec import UNSET

from tokenbus.protocol.wire import codec, messages


class BrokenStreamError(RuntimeError):
    """Chunks contradict each other: what follows can't be trusted."""


class Ready(NamedTuple):
    """A chunk, or what of it is new."""

    chunk: messages.Chunk


class Duplicate(NamedTuple):
    """Nothing new."""


class Gap(NamedTuple):
    """Something before this chunk is missing; it is to be had again."""


class Reassembler:
    """Counts tokens and text of one stream, attempt by attempt."""

    def __init__(self) -> None:
        self.attempt = 0
        self.num_tokens = 0
        self.text_bytes = 0

    def __repr__(self) -> str:
        return f"<Reassembler attempt {self.attempt}: {self.num_tokens} tokens, {self.text_bytes} bytes>"

    @property
    def is_empty(self) -> bool:
        return not (self.num_tokens or self.text_bytes)

    def add(self, chunk: messages.Chunk) -> Ready | Duplicate | Gap:
        """What to do with a chunk. Raises BrokenStreamError when it contradicts what has come so far.

        A router's chunks carry nothing, and no offsets that mean anything: it does not know how far the stream is."""
        if chunk.attempt < self.attempt:
            return Duplicate()
        carries = chunk.tokens or chunk.text
        if carries and chunk.attempt > self.attempt and chunk.offset < self.num_tokens:
            raise BrokenStreamError(
                f"attempt {chunk.attempt} begins at token {chunk.offset}, attempt {self.attempt} had {self.num_tokens}"
            )
        self.attempt = chunk.attempt
        if not carries:
            return self._add_empty(chunk)
        if chunk.offset > self.num_tokens:
            return Gap()
        if self._is_known(chunk):
            return Duplicate()
        return self._advance(self._cut(chunk))

    def _add_empty(self, chunk: messages.Chunk) -> Ready | Gap:
        by_router = chunk.worker_id is None or chunk.worker_id is UNSET
        if chunk.offset > self.num_tokens and not by_router and chunk.finish_reason is not messages.FinishReason.ERROR:
            return Gap()
        return Ready(chunk)

    def _is_known(self, chunk: messages.Chunk) -> bool:
        ends_at = chunk.offset + chunk.tokens, chunk.text_offset + len(chunk.text.encode())
        return chunk.finish_reason is None and ends_at[0] <= self.num_tokens and ends_at[1] <= self.text_bytes

    def _cut(self, chunk: messages.Chunk) -> messages.Chunk:
        """The part of a chunk that is new: chunks that are published again may be cut elsewhere than before."""
        known_tokens, known_bytes = self.num_tokens - chunk.offset, self.text_bytes - chunk.text_offset
        if (known_tokens, known_bytes) == (0, 0):
            return chunk
        text = chunk.text.encode()
        if not (0 <= known_tokens <= chunk.tokens and 0 <= known_bytes <= len(text)):
            raise BrokenStreamError(
                f"a chunk from token {chunk.offset}, byte {chunk.text_offset} does not fit "
                f"token {self.num_tokens}, byte {self.text_bytes}"
            )
        return codec.replace(
            chunk,
            offset=self.num_tokens,
            tokens=chunk.tokens - known_tokens,
            text_offset=self.text_bytes,
            text=text[known_bytes:].decode(errors="replace"),
            token_ids=UNSET if chunk.token_ids is UNSET else chunk.token_ids[known_tokens:],
            logprobs=UNSET if chunk.logprobs is UNSET else chunk.logprobs[known_tokens:],
        )

    def _advance(self, chunk: messages.Chunk) -> Ready:
        self.num_tokens += chunk.tokens
        self.text_bytes += len(chunk.text.encode())
        return Ready(chunk)
