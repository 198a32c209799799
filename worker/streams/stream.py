"""The stream of one accepted request: makes numbered chunks of an engine's outputs, and one terminal.

The engine's side of the same request is a `Generation` (worker/engine_client). Between the two lies the engine
contract: the generation makes outputs of tokens, whichever engine computes them, and the stream makes what the client
sees of outputs."""

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
    """Makes the chunks of one request, which the outbox publishes. Only this class counts offsets."""

    def __init__(
        self,
        run: internal.Run,
        model: str,
        worker_id: str,
        now: float,
        gone_subject: str = "",
        token_bytes: Sequence[bytes] = (),
        hash_scheme: str = "",
    ) -> None:
        # the tokens would be kept for a minute after the stream's end
        self.run = codec.replace(run, token_ids=b"", resume_from=None)
        self._prompt_tokens = len(run.token_ids) // 4
        self.key = run.request_id
        self.gone_subject = gone_subject
        """The subject on which the broker reports that nobody listened to a chunk."""
        self._model = model
        self._worker_id = worker_id
        self._id = subjects.key_to_request_id(run.request_id)
        self._token_bytes = token_bytes
        self._hash_scheme = hash_scheme
        asked = run.params.logprobs
        self._replay_buffer = ReplayBuffer(0 if asked is None else 1 + min(asked, len(token_bytes)))
        self.created = int(time.time())
        self.accepted_at = now
        self.began_at = now - (run.resume_from.elapsed_ms / 1e3 if run.resume_from else 0.0)
        """When the first worker accepted the request."""
        self.span = tracing.NOOP_SPAN
        self.slow = backoff.BackoffTimer(backoff.FIRST_S)
        """Decides when to log again that the request waits for its first token."""
        self.last_chunk_at = now
        """When the last chunk was made, in seconds of the caller's clock."""
        self.replayed_at = 0.0
        """When it was last replayed; 0 if never."""
        self.first_token_sent = False
        self.terminal: messages.Chunk | None = None
        """The last chunk, once it has been published."""
        self.cancel_error: errors.Error | None = None
        """The error that a cancel is reported as if the client did not ask for it, such as an expired deadline."""

    def __repr__(self) -> str:
        return f"<Stream {self.key} attempt {self.run.attempt}: {self._replay_buffer.num_tokens} tokens>"

    @property
    def memory_bytes(self) -> int:
        """Approximate memory that the stream takes once it has ended, in bytes."""
        return 2_048 + self._replay_buffer.memory_bytes

    def head(self) -> messages.Chunk | None:
        """Returns an empty chunk at the current offset, or None if the client wants only a terminal."""
        if not self.run.params.is_streamed:
            return None
        empty = self._empty(self._replay_buffer.num_tokens, self._replay_buffer.text_bytes)
        return codec.replace(empty, hash_scheme=self._hash_scheme)

    def resume(self, output: contract.Output) -> None:
        """Takes tokens that the client has already from another worker, so that they can be published again."""
        self._replay_buffer.append_resumed(output.token_ids, output.text, output.logprobs)

    def chunk(self, output: contract.Output) -> messages.Chunk | None:
        """Returns the chunk that carries an output, or None if the terminal will."""
        if output.progress is not None:
            head = self.head()
            return None if head is None else codec.replace(head, progress=output.progress)
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
        # nothing was streamed: the terminal carries the whole completion
        self._replay_buffer.append(output.token_ids, output.text, output.logprobs)
        return self._terminal(output, self._replay_buffer.all())

    def internal_error(self) -> contract.Output:
        """Returns the terminal output of a stream that failed here and not in the engine."""
        return contract.Output(
            token_ids=[],
            text="",
            finish_reason=messages.FinishReason.ERROR,
            error=errors.make_error(errors.Code.INTERNAL),
            usage=self._usage(self._replay_buffer.num_tokens),
            timings=_NO_TIMINGS,
        )

    def too_large_terminal(self, chunk: messages.Chunk) -> messages.Chunk:
        """Returns the terminal to publish in place of a chunk that is larger than the broker takes."""
        problem = _ANSWER_SIZE if chunk.finish_reason else _STEP_SIZE
        return codec.replace(
            self._empty(chunk.offset, chunk.text_offset),
            tokens=chunk.tokens,
            finish_reason=messages.FinishReason.ERROR,
            usage=chunk.usage or self._usage(chunk.offset + chunk.tokens),
            timings=chunk.timings or _NO_TIMINGS,
            error=errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, problem),
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
        """Yields the chunks from token `offset` on, each of at most `max_bytes`, and the terminal if there is one; if
        there is neither, an empty chunk shows that the stream is alive."""
        chunks = 0
        if self.run.params.is_streamed:
            # the terminal's own tokens are in the terminal
            end = self._replay_buffer.num_tokens if self.terminal is None else self.terminal.offset
            for segment in self._replay_buffer.segments(offset, max_bytes, end):
                yield self._segment_chunk(segment)
                chunks += 1
        last = self.terminal or (None if chunks else self.head())
        if last is not None:
            yield last

    def _empty(self, offset: int, text_offset: int) -> messages.Chunk:
        """Returns a chunk without tokens that names the worker."""
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=offset,
            text_offset=text_offset,
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
        )

    def _segment_chunk(self, segment: Segment) -> messages.Chunk:
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=segment.offset,
            tokens=segment.num_tokens,
            text_offset=segment.text_offset,
            text=segment.text,
            token_ids=segment.token_ids if self.run.params.return_token_ids else UNSET,
            logprobs=self._wanted_logprobs(segment.logprobs),
        )

    def _terminal(self, output: contract.Output, segment: Segment) -> messages.Chunk:
        reason, error = output.finish_reason, output.error
        if reason is messages.FinishReason.CANCELLED and self.cancel_error is not None:
            reason, error = messages.FinishReason.ERROR, self.cancel_error
        return codec.replace(
            self._segment_chunk(segment),
            finish_reason=reason,
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
            usage=codec.unset_if_none(output.usage),
            timings=codec.unset_if_none(output.timings),
            stop_match=codec.unset_if_none(output.stop_match),
            error=codec.unset_if_none(error),
            routing=codec.unset_if_none(self.run.routing),
        )

    def _wanted_logprobs(self, logprobs: list[contract.Logprob]) -> list[messages.TokenLogprob] | UnsetType:
        if self.run.params.logprobs is None:
            return UNSET
        named = []
        for one in logprobs:
            token = self._token_bytes[one.token_id]
            text, top = token.decode(errors="replace"), [self._alternative(*alternative) for alternative in one.top]
            named.append(
                messages.TokenLogprob(id=one.token_id, text=text, bytes=list(token), logprob=one.logprob, top=top)
            )
        return named

    def _alternative(self, token_id: int, logprob: float) -> messages.TokenAlternative:
        token = self._token_bytes[token_id]
        text = token.decode(errors="replace")
        return messages.TokenAlternative(id=token_id, text=text, bytes=list(token), logprob=logprob)
