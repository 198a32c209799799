"""Checks that a stream's chunks are complete and in order; pure."""

from protocol import messages


class BrokenStreamError(RuntimeError):
    """A chunk is missing or out of order: what follows can't be trusted."""


class Order:
    """Counts tokens and text of one stream, attempt by attempt."""

    def __init__(self) -> None:
        self.attempt = 0
        self.num_tokens = 0
        self.text_bytes = 0

    def __repr__(self) -> str:
        return f"<Order attempt {self.attempt}: {self.num_tokens} tokens, {self.text_bytes} bytes>"

    def take(self, chunk: messages.Chunk) -> bool:
        """Whether a chunk is to be used: not if it belongs to an earlier attempt.

        Raises BrokenStreamError when it does not continue what has come so far. A terminal that carries nothing may
        come with the offsets of whoever sent it, who need not know how far the stream was."""
        if chunk.attempt < self.attempt:
            return False
        carries = chunk.tokens or chunk.text
        if carries and (chunk.offset, chunk.text_offset) != (self.num_tokens, self.text_bytes):
            raise BrokenStreamError(
                f"the stream goes on at token {chunk.offset}, byte {chunk.text_offset}; "
                f"token {self.num_tokens}, byte {self.text_bytes} was to come"
            )
        self.attempt = chunk.attempt
        self.num_tokens += chunk.tokens
        self.text_bytes += len(chunk.text.encode())
        return True
