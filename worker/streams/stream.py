"""One stream from a frontend to a client: makes numbered chunks of an engine's outputs, and one terminal at the end."""

import time
from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from tokenbus.protocol.telemetry import backoff, tracing
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects
from tokenbus.worker import contract
from tokenbus.worker.streams.replay_buffer import ReplayBuffer, Segment

_NO_TIMINGS = messages.Timings(queue_ms=0.0, prefill_ms=0.0, ttft_ms=0.0, decode_ms=0.0, total_ms=0.0)
_ANSWER_SIZE = "the whole answer does not fit one message: stream it"
_STEP_SIZE = "what one step brought does not fit one message of this broker: ask for fewer logprobs"


class Stream:
    """Chunks of one accepted request, not published yet. Offsets and counts are this class's alone."""

    def __init__(
        self,
        run: internal.Run,
        model: str,
        worker_id: str,
        now: float,
        gone_subject: str = "",
        token_bytes: Sequence[bytes] = (),
    ) -> None:
        self.run = codec.replace(run, token_ids=b"")
        self._prompt_tokens = len(run.token_ids) // 4
        self.key = run.request_id
        self.gone_subject = gone_subject
        """Where the broker says that nobody has listened to a chunk."""
        self._model = model
        self._worker_id = worker_id
        self._id = subjects.key_to_request_id(run.request_id)
        self._token_bytes = token_bytes
        asked = run.params.logprobs
        self._replay_buffer = ReplayBuffer(0 if asked is None else 1 + min(asked, len(token_bytes)))
        self.created = int(time.time())
        self.accepted_at = now
        self.span = tracing.NOOP_SPAN
        self.slow = backoff.BackoffTimer(backoff.FIRST_S)
        """When the log says again that it waits for its first token."""
        self.last_chunk_at = now
        """When the last chunk was made, on the caller's clock."""
        self.replayed_at = 0.0
        """When it was last published again."""
        self.first_token_sent = False
        self.terminal: messages.Chunk | None = None
        """The last chunk, once it has been published."""
        self.cancel_error: errors.Error | None = None
        """What a cancel by ourselves is called, where it was not the client's wish."""

    def __repr__(self) -> str:
        return f"<Stream {self.key} attempt {self.run.attempt}: {self._replay_buffer.num_tokens} tokens>"

    @property
    def memory_bytes(self) -> int:
        """Memory that the stream takes after its end, about."""
        return 2_048 + self._replay_buffer.memory_bytes

    def head(self) -> messages.Chunk | None:
        """The first chunk, which says who has accepted the request; also an empty one later. None where only a
        terminal is wanted."""
        if not self.run.params.is_streamed:
            return None
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=self._replay_buffer.num_tokens,
            text_offset=self._replay_buffer.text_bytes,
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
        )

    def chunk(self, output: contract.Output) -> messages.Chunk | None:
        """The chunk that carries an output, or None where it is collected for the terminal."""
        if output.progress is not None:
            return self._progress(output.progress)
        new = Segment(
            self._replay_buffer.num_tokens,
            len(output.token_ids),
            self._replay_buffer.text_bytes,
            output.text,
            output.token_ids,
            output.logprobs,
        )
        if output.finish_reason is None:
            self._replay_buffer.append(output.token_ids, output.text, output.logprobs)
            return self._segment_chunk(new) if self.run.params.is_streamed else None
        if self.run.params.is_streamed:
            return self._terminal(output, new)
        self._replay_buffer.append(output.token_ids, output.text, output.logprobs)
        return self._terminal(output, self._replay_buffer.all())

    def internal_error(self) -> contract.Output:
        """The terminal of a stream that failed here and not in the engine."""
        return contract.Output(
            token_ids=[],
            text="",
            finish_reason=messages.FinishReason.ERROR,
            error=errors.make_error(errors.Code.INTERNAL),
            usage=self._usage(self._replay_buffer.num_tokens),
            timings=_NO_TIMINGS,
        )

    def too_large_terminal(self, chunk: messages.Chunk) -> messages.Chunk:
        """The terminal to send in place of a chunk that is larger than the broker takes: nothing can follow it."""
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=chunk.offset,
            tokens=chunk.tokens,
            text_offset=chunk.text_offset,
            finish_reason=messages.FinishReason.ERROR,
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
            usage=chunk.usage or self._usage(chunk.offset + chunk.tokens),
            timings=chunk.timings or _NO_TIMINGS,
            error=errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, _ANSWER_SIZE if chunk.finish_reason else _STEP_SIZE),
        )

    def _usage(self, completion_tokens: int) -> messages.Usage:
        prompt = self._prompt_tokens
        return messages.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion_tokens,
            total_tokens=prompt + completion_tokens,
            cached_tokens=0,
        )

    def replay(self, offset: int, max_bytes: int) -> Iterator[messages.Chunk]:
        """Everything said from a token on, and the terminal if there is one; an empty chunk if there is nothing."""
        chunks = 0
        if self.run.params.is_streamed:
            end = self._replay_buffer.num_tokens if self.terminal is None else self.terminal.offset
            for segment in self._replay_buffer.segments(offset, max_bytes, end):
                yield self._segment_chunk(segment)
                chunks += 1
        last = self.terminal or (None if chunks else self.head())
        if last is not None:
            yield last

    def _progress(self, progress: messages.Progress) -> messages.Chunk | None:
        head = self.head()
        return None if head is None else codec.replace(head, progress=progress)

    def _segment_chunk(self, segment: Segment) -> messages.Chunk:
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=segment.offset,
            tokens=segment.num_tokens,
            text_offset=segment.text_offset,
            text=segment.text,
            token_ids=self._wanted_ids(segment.token_ids),
            logprobs=self._wanted_logprobs(segment.logprobs),
        )

    def _terminal(self, output: contract.Output, segment: Segment) -> messages.Chunk:
        reason, error = output.finish_reason, output.error
        if reason is messages.FinishReason.CANCELLED and self.cancel_error is not None:
            reason, error = messages.FinishReason.ERROR, self.cancel_error
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=segment.offset,
            tokens=segment.num_tokens,
            text_offset=segment.text_offset,
            text=segment.text,
            finish_reason=reason,
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
            token_ids=self._wanted_ids(segment.token_ids),
            logprobs=self._wanted_logprobs(segment.logprobs),
            usage=codec.unset_if_none(output.usage),
            timings=codec.unset_if_none(output.timings),
            stop_match=codec.unset_if_none(output.stop_match),
            error=codec.unset_if_none(error),
            routing=codec.unset_if_none(self.run.routing),
        )

    def _wanted_ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self.run.params.return_token_ids else UNSET

    def _wanted_logprobs(self, logprobs: list[contract.Logprob]) -> list[messages.TokenLogprob] | UnsetType:
        if self.run.params.logprobs is None:
            return UNSET
        return [self._token_logprob(one) for one in logprobs]

    def _token_logprob(self, one: contract.Logprob) -> messages.TokenLogprob:
        piece = self._token_bytes[one.token_id]
        top = [self._alternative(token_id, logprob) for token_id, logprob in one.top]
        text = piece.decode(errors="replace")
        return messages.TokenLogprob(id=one.token_id, text=text, bytes=list(piece), logprob=one.logprob, top=top)

    def _alternative(self, token_id: int, logprob: float) -> messages.TokenAlternative:
        piece = self._token_bytes[token_id]
        return messages.TokenAlternative(
            id=token_id, text=piece.decode(errors="replace"), bytes=list(piece), logprob=logprob
        )
