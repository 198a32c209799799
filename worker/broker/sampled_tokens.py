"""Collects sampled tokens for the event log."""

from array import array
from collections.abc import Iterable

from tokenbus.protocol.wire import internal, limits


class SampledTokens:
    """The tokens that one entry of the event log will carry, in the order in which they were sampled."""

    def __init__(self) -> None:
        self.stream_nos = array("I")
        self.token_ids = array("I")
        self.logprobs: dict[int, bytes] = {}
        self.first_tokens: list[internal.FirstToken] = []
        self._logprob_bytes = 0

    def __repr__(self) -> str:
        return f"<SampledTokens {len(self.token_ids)}>"

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether further tokens must go into another entry."""
        return 8 * len(self.token_ids) + self._logprob_bytes >= limits.PART_BYTES // 2

    def add(
        self, stream_no: int, token_ids: Iterable[int], logprobs: bytes, first_token: internal.FirstToken | None
    ) -> None:
        """Adds tokens of a stream, with their packed log probabilities and the record of its first token, if any."""
        for token_id in token_ids:
            self.stream_nos.append(stream_no)
            self.token_ids.append(token_id)
        if logprobs:
            self.logprobs[stream_no] = self.logprobs.get(stream_no, b"") + logprobs
            self._logprob_bytes += len(logprobs)
        if first_token is not None:
            self.first_tokens.append(first_token)

    def remove(self, stream_no: int) -> None:
        """Discards the tokens of a stream that ends without publishing them."""
        kept = [pair for pair in zip(self.stream_nos, self.token_ids, strict=True) if pair[0] != stream_no]
        self.stream_nos = array("I", (pair[0] for pair in kept))
        self.token_ids = array("I", (pair[1] for pair in kept))
        self.logprobs.pop(stream_no, None)
        self.first_tokens = [one for one in self.first_tokens if one.stream_no != stream_no]
