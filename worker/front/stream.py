"""One stream from a front to a client: makes numbered chunks of an engine's outputs, and one terminal at the end."""

import time

from msgspec import UNSET, UnsetType

from protocol import codec, errors, internal, messages, subjects
from worker import contract


class Stream:
    """Chunks of one accepted request, not published yet. Offsets and counts are this class's alone."""

    def __init__(self, run: internal.Run, model: str, worker_id: str, now: float) -> None:
        self.run = run
        self.key = run.request_id
        self._model = model
        self._worker_id = worker_id
        self._id = subjects.key_to_request_id(run.request_id)
        self._offset = 0
        self._text_offset = 0
        self._collected_ids: list[int] = []
        self._collected_text: list[str] = []
        self.created = int(time.time())
        self.spoke_at = now
        """When the last chunk was made, on the caller's clock."""
        self.has_spoken = False
        self.end_with: errors.Error | None = None
        """What a cancel by ourselves is called, where it was not the client's wish."""

    def __repr__(self) -> str:
        return f"<Stream {self.key} attempt {self.run.attempt}: {self._offset} tokens>"

    def head(self) -> messages.Chunk | None:
        """The first chunk, which says who has accepted the request; also an empty one later. None where only a
        terminal is wanted."""
        if not self.run.params.stream:
            return None
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=self._offset,
            text_offset=self._text_offset,
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
        )

    def chunk(self, output: contract.Output) -> messages.Chunk | None:
        """The chunk that carries an output, or None where it is collected for the terminal."""
        if not self.run.params.stream:
            return self._collect(output)
        if output.finish_reason is not None:
            return self._advanced(self._terminal(output, output.token_ids, output.text), output)
        chunk = messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=self._offset,
            tokens=len(output.token_ids),
            text_offset=self._text_offset,
            text=output.text,
            token_ids=self._wanted_ids(output.token_ids),
        )
        return self._advanced(chunk, output)

    def _advanced(self, chunk: messages.Chunk, output: contract.Output) -> messages.Chunk:
        self._offset += len(output.token_ids)
        self._text_offset += len(output.text.encode())
        return chunk

    def _collect(self, output: contract.Output) -> messages.Chunk | None:
        self._collected_ids += output.token_ids
        self._collected_text.append(output.text)
        if output.finish_reason is None:
            return None
        return self._terminal(output, self._collected_ids, "".join(self._collected_text))

    def _terminal(self, output: contract.Output, token_ids: list[int], text: str) -> messages.Chunk:
        reason, error = output.finish_reason, output.error
        if reason is messages.FinishReason.CANCELLED and self.end_with is not None:
            reason, error = messages.FinishReason.ERROR, self.end_with
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=self._offset,
            tokens=len(token_ids),
            text_offset=self._text_offset,
            text=text,
            finish_reason=reason,
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
            token_ids=self._wanted_ids(token_ids),
            usage=codec.given(output.usage),
            timings=codec.given(output.timings),
            stop_match=codec.given(output.stop_match),
            error=codec.given(error),
            routing=codec.given(self.run.routing),
        )

    def _wanted_ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self.run.params.return_token_ids else UNSET


def too_large(terminal: messages.Chunk) -> messages.Chunk:
    """The terminal to send in place of one that is larger than the broker takes."""
    return messages.Chunk(
        id=terminal.id,
        attempt=terminal.attempt,
        offset=terminal.offset,
        tokens=terminal.tokens,
        text_offset=terminal.text_offset,
        finish_reason=messages.FinishReason.ERROR,
        worker_id=terminal.worker_id,
        model=terminal.model,
        created=terminal.created,
        usage=terminal.usage,
        timings=terminal.timings,
        error=errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, "the whole answer does not fit one message: stream it"),
    )
