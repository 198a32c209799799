"""Reassembles a stream from its chunks: passes on new parts, cuts off duplicates, detects gaps.

known           |==========|
chunk         |------|            duplicate: nothing new
chunk             |--------|      overlap: its new part is passed on
chunk                        |--| gap: something before it is missing
"""

from typing import NamedTuple

from msgspec import UNSET

from tokenbus.protocol.wire import codec, messages


class BrokenStreamError(RuntimeError):
    """Chunks contradict each other, so nothing after them can be trusted."""


class ReadyChunks(NamedTuple):
    """A chunk, or its new part."""

    chunk: messages.Chunk


class Duplicate(NamedTuple):
    """The chunk contains nothing new."""


class Gap(NamedTuple):
    """Something before the chunk is missing. The chunk was not accepted: it will be published again."""


class Reassembler:
    """Counts the tokens and the text of one stream across all its attempts.

    A stream that continues an earlier one begins at token `num_tokens`; its first chunk gives its place in the text."""

    def __init__(self, num_tokens: int = 0, prompt_offset: int | None = None) -> None:
        """`prompt_offset` is the position of the first token of the prompt whose log probability is wanted, if any."""
        self.attempt = 0
        self._worker_attempt = 0
        """The attempt of the last chunk from a worker."""
        self.num_tokens = num_tokens
        self.text_bytes = 0
        self._knows_text_bytes = not num_tokens
        self.prompt_offset = prompt_offset
        """The position of the prompt's next token whose log probability is to come; None if none were asked for."""
        self._knows_prompt_offset = not num_tokens
        self._reasoning_bytes = 0
        self._arguments_bytes: dict[int, int] = {}
        """UTF-8 bytes of arguments, by the number of the call."""

    def __repr__(self) -> str:
        return f"<Reassembler attempt {self.attempt}: {self.num_tokens} tokens, {self.text_bytes} bytes>"

    def restart_attempts(self) -> None:
        """Prepares for a request under a new id: its attempts are counted from 1, and its stream continues this one."""
        self.attempt = self._worker_attempt = 0

    def add(self, chunk: messages.Chunk) -> ReadyChunks | Duplicate | Gap:
        """Accepts a chunk if it continues the stream. Raises BrokenStreamError if it contradicts earlier ones."""
        if chunk.attempt < self.attempt:
            return Duplicate()
        if not _is_routers(chunk):
            self._check_place(chunk)
        self.attempt = chunk.attempt
        if self.prompt_offset is not None and isinstance(chunk.prompt_offset, int):
            if not self._knows_prompt_offset:
                self.prompt_offset, self._knows_prompt_offset = chunk.prompt_offset, True
            if chunk.prompt_offset > self.prompt_offset and chunk.finish_reason is not messages.FinishReason.ERROR:
                return Gap()
            if chunk.prompt_logprobs:
                chunk = self._new_prompt_part(chunk, chunk.prompt_offset, chunk.prompt_logprobs)
                if not chunk.prompt_logprobs and _is_empty(chunk) and chunk.finish_reason is None:
                    return Duplicate()
        if _is_empty(chunk):
            return self._add_empty(chunk)
        if chunk.offset > self.num_tokens:
            return Gap()
        if self._is_known(chunk):
            return Duplicate()
        new = self._new_part(chunk)
        self.num_tokens += new.tokens
        self.text_bytes += len(new.text.encode())
        if new.reasoning:
            self._reasoning_bytes = (new.reasoning_offset or 0) + len(new.reasoning.encode())
        for delta in new.tool_calls or ():
            self._arguments_bytes[delta.index] = delta.arguments_offset + len(delta.function.arguments.encode())
        return ReadyChunks(new)

    def _new_prompt_part(
        self, chunk: messages.Chunk, offset: int, logprobs: list[messages.PromptLogprob]
    ) -> messages.Chunk:
        """Cuts off the known log probabilities of the prompt."""
        assert self.prompt_offset is not None
        new = logprobs[self.prompt_offset - offset :]
        known, self.prompt_offset = self.prompt_offset, self.prompt_offset + len(new)
        return codec.replace(chunk, prompt_offset=known, prompt_logprobs=new or UNSET)

    def _check_place(self, chunk: messages.Chunk) -> None:
        """Raises BrokenStreamError if a worker restarts an attempt: its text for a known part would differ."""
        is_error = chunk.finish_reason is messages.FinishReason.ERROR and not chunk.tokens
        if chunk.attempt > self._worker_attempt and chunk.offset < self.num_tokens and not is_error:
            raise BrokenStreamError(
                f"attempt {chunk.attempt} begins at token {chunk.offset}, "
                f"attempt {self._worker_attempt} had {self.num_tokens}"
            )
        self._worker_attempt = chunk.attempt
        if not self._knows_text_bytes and chunk.offset == self.num_tokens:
            self.text_bytes, self._knows_text_bytes = chunk.text_offset, True

    def _add_empty(self, chunk: messages.Chunk) -> ReadyChunks | Gap:
        is_ahead = chunk.offset > self.num_tokens and not _is_routers(chunk)
        return Gap() if is_ahead and chunk.finish_reason is not messages.FinishReason.ERROR else ReadyChunks(chunk)

    def _is_known(self, chunk: messages.Chunk) -> bool:
        ends_at = chunk.offset + chunk.tokens, chunk.text_offset + len(chunk.text.encode())
        # A terminal is never a duplicate: the stream must end, even if all of its text is known.
        return chunk.finish_reason is None and ends_at[0] <= self.num_tokens and ends_at[1] <= self.text_bytes

    def _new_part(self, chunk: messages.Chunk) -> messages.Chunk:
        """Cuts off the known part: replayed chunks may be split differently from the originals."""
        known_tokens, known_bytes = self.num_tokens - chunk.offset, self.text_bytes - chunk.text_offset
        if (known_tokens, known_bytes) == (0, 0):
            return chunk
        if chunk.reasoning or chunk.tool_calls:
            chunk = self._without_known_parts(chunk)
        text = chunk.text.encode()
        if not (0 <= known_tokens <= chunk.tokens and 0 <= known_bytes <= len(text)):
            raise BrokenStreamError(
                f"a chunk at token {chunk.offset}, byte {chunk.text_offset} does not fit "
                f"a stream at token {self.num_tokens}, byte {self.text_bytes}"
            )
        return codec.replace(
            chunk,
            offset=self.num_tokens,
            tokens=chunk.tokens - known_tokens,
            text_offset=self.text_bytes,
            text=text[known_bytes:].decode(errors="replace"),  # workers must not split characters
            token_ids=UNSET if chunk.token_ids is UNSET else chunk.token_ids[known_tokens:],
            logprobs=UNSET if chunk.logprobs is UNSET else chunk.logprobs[known_tokens:],
        )

    def _without_known_parts(self, chunk: messages.Chunk) -> messages.Chunk:
        """Cuts off the known parts of reasoning and tool calls."""
        reasoning, offset = chunk.reasoning or "", chunk.reasoning_offset or 0
        new = _after(reasoning, self._reasoning_bytes - offset)
        deltas = []
        for delta in chunk.tool_calls or ():
            known = self._arguments_bytes.get(delta.index)
            arguments = _after(delta.function.arguments, (known or 0) - delta.arguments_offset)
            if known is not None:  # else the call is new, and the delta names it
                function = messages.FunctionDelta(arguments=arguments)
                start = max(known, delta.arguments_offset)
                delta = messages.ToolCallDelta(index=delta.index, arguments_offset=start, function=function)
            if arguments or known is None:
                deltas.append(delta)
        return codec.replace(
            chunk,
            reasoning_offset=max(self._reasoning_bytes, offset) if new else UNSET,
            reasoning=new or UNSET,
            tool_calls=deltas or UNSET,
        )


def _after(text: str, known_bytes: int) -> str:
    """Returns the part of a text after its first `known_bytes` bytes."""
    return text.encode()[max(0, known_bytes) :].decode(errors="replace")


def _is_empty(chunk: messages.Chunk) -> bool:
    return not (chunk.tokens or chunk.text or chunk.reasoning or chunk.tool_calls)


def _is_routers(chunk: messages.Chunk) -> bool:
    """Returns whether a router made the chunk: its offsets mean nothing, since a router does not know the text."""
    return _is_empty(chunk) and (chunk.worker_id is None or chunk.worker_id is UNSET)
