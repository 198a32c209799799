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
from tokenbus.worker.streams import packed_logprobs
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
        stream_no: int = 0,
    ) -> None:
        # the tokens would be kept for a minute after the stream's end
        self.run = codec.replace(run, token_ids=b"", resume_from=None)
        self._prompt_tokens = len(run.token_ids) // 4
        self.key = run.request_id
        self.stream_no = stream_no
        """The number by which the event log names it."""
        self.gone_subject = gone_subject
        """The subject on which the broker reports that nobody listened to a chunk."""
        self._model = model
        self._worker_id = worker_id
        self._id = subjects.key_to_request_id(run.request_id)
        self._token_bytes = token_bytes
        self._hash_scheme = hash_scheme
        asked = run.params.logprobs
        self._num_alternatives = 0 if asked is None else min(asked, len(token_bytes))
        self._replay_buffer = ReplayBuffer(0 if asked is None else 1 + self._num_alternatives)
        self._num_published = 0
        """Tokens of the replay buffer that have been published."""
        self.num_resumed = 0
        """Tokens that were sampled before this run."""
        self._wants_head = False
        self._progress: messages.Progress | UnsetType = UNSET
        """The progress to publish with the next head."""
        self._only_new: Segment | None = None
        """The unpublished tokens, if one output has brought them all: the buffer would take longer to return them."""
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
        self.max_tokens: int | None = None
        """Tokens that it may have, once that is known."""
        self.first_token: internal.FirstToken | None = None
        """The account of its first token, if that was sampled here."""
        self.first_token_sent = False
        """Whether a token that was sampled here has been published in a chunk."""
        self.ending: messages.Chunk | None = None
        """The last chunk, until it has been published. What else is unpublished comes before it."""
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

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more outputs. Its terminal may have to be published yet."""
        return self.ending is not None or self.terminal is not None

    def want_head(self) -> None:
        """Has the next chunks begin with an empty one, which opens the stream or shows that it is alive."""
        self._wants_head = True

    def head(self) -> messages.Chunk | None:
        """Returns an empty chunk behind the last published one, or None if the client wants only a terminal."""
        return self._head() if self.run.params.is_streamed else None

    def resume(self, output: contract.Output) -> None:
        """Takes tokens that the client has already from another worker, so that they can be published again."""
        self._replay_buffer.append_resumed(output.token_ids, output.text, output.logprobs)
        self._num_published = self.num_resumed = self._replay_buffer.num_tokens

    def add(self, output: contract.Output) -> None:
        """Takes an engine's output; `unpublished` makes chunks of it."""
        if output.progress is not None:
            self._wants_head, self._progress = True, output.progress
            return
        buffer = self._replay_buffer
        offset = buffer.num_tokens
        new = Segment(offset, len(output.token_ids), buffer.text_bytes, output.text, output.token_ids, output.logprobs)
        if output.first_token is not None:
            self.first_token = self._to_first_token(output.first_token)
        if output.finish_reason is not None and self.run.params.is_streamed:
            self.ending = self._terminal(output, new)
            return
        buffer.append(output.token_ids, output.text, output.logprobs)
        if output.finish_reason is not None:
            # nothing was streamed: the terminal carries the whole completion
            self.ending = self._terminal(output, buffer.all())
        else:
            # text that the buffer adds to a published token would never be published
            assert output.token_ids or not output.text, output
            self._only_new = new if offset == self._num_published else None

    def unpublished(self, max_bytes: int) -> list[messages.Chunk]:
        """Returns the chunks that have not been published, each of at most `max_bytes` or of one token. The terminal is
        among them if the stream has ended."""
        last = [] if self.ending is None else [self.ending]
        if not self.run.params.is_streamed:
            return last
        first = [self._head(self._progress)] if self._wants_head else []
        if self._only_new is not None:
            return [*first, self._segment_chunk(self._only_new), *last]
        end = None if self.ending is None else self.ending.offset
        segments = self._replay_buffer.segments(self._num_published, max_bytes, end)
        return [*first, *map(self._segment_chunk, segments), *last]

    def mark_published(self) -> None:
        """Everything unpublished has been published."""
        self._wants_head, self._progress, self._only_new = False, UNSET, None
        num_tokens = self._replay_buffer.num_tokens
        if num_tokens > self._num_published:
            self._num_published = num_tokens
            self.first_token_sent = self.first_token_sent or self.run.params.is_streamed
        if self.ending is not None:
            self.terminal, self.ending = self.ending, None

    def snapshot(self, known_tokens: int | None) -> internal.RunningRequest:
        """Returns the stream as a snapshot lists it, with the published tokens behind those that are known; with none
        if `known_tokens` is None."""
        tokens = self._num_published if known_tokens is None else max(0, known_tokens)
        buffer, end = self._replay_buffer, self._num_published
        return internal.RunningRequest(
            id=self.key,
            attempt=self.run.attempt,
            stream_no=self.stream_no,
            num_tokens=end,
            token_ids=buffer.packed_token_ids(tokens, end),
            logprobs=packed_logprobs.pack(buffer.logprobs(tokens, end)),
            first_token=self.first_token if end else None,
        )

    def pack_logprobs(self, output: contract.Output) -> bytes:
        """Returns the log probabilities of an output's tokens as they are kept; nothing if none were asked for."""
        if self.run.params.logprobs is None:
            return b""
        count = self._num_alternatives
        return packed_logprobs.pack(codec.replace(one, top=one.top[:count]) for one in output.logprobs)

    def fail(self) -> None:
        """Ends it with an error, because of a bug. The terminal counts the unpublished tokens and has no text."""
        last = self._head() if self.run.params.is_streamed else self._empty(0, 0)
        self._only_new = None
        unpublished = codec.replace(last, tokens=self._replay_buffer.num_tokens - last.offset)
        self.ending = self._error_terminal(unpublished, errors.make_error(errors.Code.INTERNAL))

    def too_large_terminal(self, chunk: messages.Chunk) -> messages.Chunk:
        """Returns the terminal to publish in place of a chunk that is larger than the broker takes."""
        problem = _ANSWER_SIZE if chunk.finish_reason else _STEP_SIZE
        return self._error_terminal(chunk, errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, problem))

    def _error_terminal(self, chunk: messages.Chunk, error: errors.Error) -> messages.Chunk:
        """Returns a terminal in place of a chunk."""
        return codec.replace(
            self._empty(chunk.offset, chunk.text_offset),
            tokens=chunk.tokens,
            finish_reason=messages.FinishReason.ERROR,
            usage=chunk.usage or self._usage(chunk.offset + chunk.tokens),
            timings=chunk.timings or _NO_TIMINGS,
            error=error,
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
        """Yields the published chunks from token `offset` on, each of at most `max_bytes`, and the terminal if it has
        been published; if there is neither, an empty chunk shows that the stream is alive."""
        chunks = 0
        if self.run.params.is_streamed:
            # the terminal's own tokens are in the terminal
            end = self._num_published if self.terminal is None else self.terminal.offset
            for segment in self._replay_buffer.segments(offset, max_bytes, end):
                yield self._segment_chunk(segment)
                chunks += 1
        last = self.terminal or (None if chunks else self.head())
        if last is not None:
            yield last

    def _head(self, progress: messages.Progress | UnsetType = UNSET) -> messages.Chunk:
        at = self._num_published
        empty = self._empty(at, self._replay_buffer.text_offset(at))
        return codec.replace(empty, hash_scheme=self._hash_scheme, progress=progress)

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

    def _to_first_token(self, found: contract.FirstToken) -> internal.FirstToken:
        return internal.FirstToken(
            stream_no=self.stream_no,
            cached_tokens=found.cached_tokens,
            queue_ms=found.queue_ms,
            prefill_ms=found.prefill_ms,
            max_tokens=self.max_tokens,
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
