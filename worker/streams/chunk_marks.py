"""Marks the latest chunks of a stream, so that the broker's notice that one has found no subscriber says which."""

from tokenbus.protocol.wire import messages, subjects


class ChunkMarks:
    """The reply subjects of one stream's chunks, used in turn, and what the last chunk with each of them carried."""

    __slots__ = ("_carried", "_number", "_subjects", "probe_subject")

    def __init__(self, gone_subject: str) -> None:
        """`gone_subject` is the subject of the stream's notices, without a mark; if empty, none are wanted."""
        self.probe_subject = gone_subject + subjects.PROBE_SUFFIX
        self._subjects = [f"{gone_subject}:{mark}" for mark in range(subjects.NUM_MARKS)] if gone_subject else []
        self._carried: list[tuple[int, int | None] | None] = [None] * subjects.NUM_MARKS
        self._number = 0

    def __repr__(self) -> str:
        return f"<ChunkMarks {self._carried}>"

    def subject(self, ahead: int) -> str:
        """Returns the reply subject of the next chunk, or of the one that many after it."""
        return self._subjects[(self._number + 1 + ahead) % subjects.NUM_MARKS] if self._subjects else ""

    def sent(self, chunk: messages.Chunk) -> None:
        """Notes that the next chunk was published."""
        number = self._number = (self._number + 1) % subjects.NUM_MARKS
        self._carried[number] = chunk.offset, (chunk.prompt_offset or 0) if chunk.prompt_logprobs else None

    def carried(self, mark: int) -> tuple[int, int | None] | None:
        """Returns the offset of the last chunk with a mark, and its `prompt_offset`; None if that was forgotten."""
        return self._carried[mark]

    def forget(self, offset: int, prompt_offset: int | None) -> None:
        """Forgets the chunks that are about to be published again: those from token `offset` on, and those with log
        probabilities from `prompt_offset` on. A notice that is still on its way says nothing new about them."""
        self._carried = [
            carried if carried is not None and not _is_after(carried, offset, prompt_offset) else None
            for carried in self._carried
        ]


def _is_after(carried: tuple[int, int | None], offset: int, prompt_offset: int | None) -> bool:
    """Whether a stream that is published again from there on has the chunk that carried this."""
    at, prompt_at = carried
    return at >= offset if prompt_at is None else prompt_offset is not None and prompt_at >= prompt_offset
