"""Collects sampled tokens for the event log; pure."""

from array import array

from tokenbus.protocol.wire import internal, limits
from tokenbus.worker import engine_output
from tokenbus.worker.streams.stream import Stream


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

    def add(self, stream: Stream, output: engine_output.Output) -> None:
        """Adds the tokens of an output that the stream has already made a chunk of."""
        number = stream.stream_no
        for token_id in output.token_ids:
            self.stream_nos.append(number)
            self.token_ids.append(token_id)
        if output.logprobs and (packed := stream.pack_logprobs(output)):
            self.logprobs[number] = self.logprobs.get(number, b"") + packed
            self._logprob_bytes += len(packed)
        if output.first_token is not None and stream.first_token is not None:
            self.first_tokens.append(stream.first_token)

    def remove(self, stream: Stream) -> None:
        """Discards the tokens of a stream that ends without publishing them."""
        number = stream.stream_no
        kept = [pair for pair in zip(self.stream_nos, self.token_ids, strict=True) if pair[0] != number]
        self.stream_nos = array("I", (pair[0] for pair in kept))
        self.token_ids = array("I", (pair[1] for pair in kept))
        self.logprobs.pop(number, None)
        self.first_tokens = [one for one in self.first_tokens if one.stream_no != number]
