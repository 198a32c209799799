"""Keeps the log probabilities of a stream's prompt, packed, so that any of them can be published again."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenbus.protocol.wire import messages
from tokenbus.worker.contract import prompt_logprobs

_ENTRY_BYTES = 90
"""The most bytes of JSON of a token and its log probability, without its text and bytes."""
_TOKEN_GROWTH = 10
"""The most bytes of JSON for each byte of a token: six as text, four in the list of bytes."""
MAX_CHUNK_BYTES = 128 * 1024
"""The size of one chunk: other streams' chunks wait for no longer than it takes to make and send that much."""


class PromptPart(NamedTuple):
    """Log probabilities of consecutive tokens of the prompt."""

    offset: int
    """The position of the first one."""
    logprobs: list[messages.PromptLogprob]


class PromptScoreBuffer:
    """The log probabilities of a prompt, with `num_alternatives` each, from position `start` on."""

    def __init__(self, num_alternatives: int, start: int, token_bytes: Sequence[bytes]) -> None:
        self._num_alternatives = num_alternatives
        self._record_bytes = prompt_logprobs.record_bytes(num_alternatives)
        self._start = start
        self._token_bytes = token_bytes
        self._packed = bytearray()

    def __repr__(self) -> str:
        return f"<PromptScoreBuffer {self._start} to {self.end}>"

    @property
    def end(self) -> int:
        """The position of the next token."""
        return self._start + len(self._packed) // self._record_bytes

    @property
    def memory_bytes(self) -> int:
        return len(self._packed)

    def append(self, packed: bytes) -> None:
        """Adds the next tokens."""
        self._packed += packed

    def parts(self, start: int, max_bytes: int | None = None) -> Iterator[PromptPart]:
        """Yields the tokens from `start` on in parts of at most `max_bytes` of JSON, or of one token; all as one if
        that is None."""
        offset = start = max(start, self._start)
        logprobs: list[messages.PromptLogprob] = []
        size = 0
        for one in prompt_logprobs.unpack(
            bytes(self._packed[(start - self._start) * self._record_bytes :]), self._num_alternatives
        ):
            added = self._json_bytes(one)
            if logprobs and max_bytes is not None and size + added > max_bytes:
                yield PromptPart(offset, logprobs)
                offset, logprobs, size = offset + len(logprobs), [], 0
            logprobs.append(self._named(one))
            size += added
        if logprobs:
            yield PromptPart(offset, logprobs)

    def _json_bytes(self, one: prompt_logprobs.ScoredToken) -> int:
        tokens = self._token_bytes
        text = len(tokens[one.token_id]) + sum([len(tokens[token_id]) for token_id, _ in one.top])
        return _ENTRY_BYTES * (1 + len(one.top)) + _TOKEN_GROWTH * text

    def _named(self, one: prompt_logprobs.ScoredToken) -> messages.PromptLogprob:
        token = self._token_bytes[one.token_id]
        return messages.PromptLogprob(
            id=one.token_id,
            text=token.decode(errors="replace"),
            bytes=list(token),
            logprob=one.logprob,
            rank=one.rank,
            top=[self._alternative(*alternative) for alternative in one.top],
        )

    def _alternative(self, token_id: int, logprob: float) -> messages.TokenAlternative:
        token = self._token_bytes[token_id]
        text = token.decode(errors="replace")
        return messages.TokenAlternative(id=token_id, text=text, bytes=list(token), logprob=logprob)
