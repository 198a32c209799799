"""One stream from a front to a client: makes numbered chunks of an engine's outputs, and one terminal at the end."""

import time
from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from tokenbus.protocol.telemetry import slow, traces
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects
from tokenbus.worker import contract
from tokenbus.worker.streams.history import History, Passage

_NO_TIMINGS = messages.Timings(queue_ms=0.0, prefill_ms=0.0, ttft_ms=0.0, decode_ms=0.0, total_ms=0.0)
_NOT_ONE = "the whole answer does not fit one message: stream it"
_NOT_EVEN_THIS = "what one step brought does not fit one message of this broker: ask for fewer logprobs"


class Stream:
    """Chunks of one accepted request, not published yet. Offsets and counts are this class's alone."""

    def __init__(
        self,
        run: internal.Run,
        model: str,
        worker_id: str,
        now: float,
        gone_subject: str = "",
        pieces: Sequence[bytes] = (),
    ) -> None:
        self.run = codec.replaced(run, token_ids=b"")
        self._prompt_tokens = len(run.token_ids) // 4
        self.key = run.request_id
        self.gone_subject = gone_subject
        """Where the broker says that nobody has listened to a chunk."""
        self._model = model
        self._worker_id = worker_id
        self._id = subjects.key_to_request_id(run.request_id)
        self._pieces = pieces
        asked = run.params.logprobs
        self._history = History(0 if asked is None else 1 + min(asked, len(pieces)))
        self.created = int(time.time())
        self.accepted_at = now
        self.span = traces.UNTRACED
        self.slow = slow.SlowWait(slow.FIRST_S)
        """When the log says again that it waits for its first token."""
        self.spoke_at = now
        """When the last chunk was made, on the caller's clock."""
        self.repeated_at = 0.0
        """When it was last published again."""
        self.has_spoken = False
        self.terminal: messages.Chunk | None = None
        """The last chunk, once it has been published."""
        self.end_with: errors.Error | None = None
        """What a cancel by ourselves is called, where it was not the client's wish."""

    def __repr__(self) -> str:
        return f"<Stream {self.key} attempt {self.run.attempt}: {self._history.num_tokens} tokens>"

    @property
    def held_bytes(self) -> int:
        """Memory that the stream takes after its end, about."""
        return 2_048 + self._history.held_bytes

    def head(self) -> messages.Chunk | None:
        """The first chunk, which says who has accepted the request; also an empty one later. None where only a
        terminal is wanted."""
        if not self.run.params.stream:
            return None
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=self._history.num_tokens,
            text_offset=self._history.text_bytes,
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
        )

    def chunk(self, output: contract.Output) -> messages.Chunk | None:
        """The chunk that carries an output, or None where it is collected for the terminal."""
        if output.progress is not None:
            return self._progress(output.progress)
        new = Passage(
            self._history.num_tokens,
            len(output.token_ids),
            self._history.text_bytes,
            output.text,
            output.token_ids,
            output.logprobs,
        )
        if output.finish_reason is None:
            self._history.append(output.token_ids, output.text, output.logprobs)
            return self._piece(new) if self.run.params.stream else None
        if self.run.params.stream:
            return self._terminal(output, new)
        self._history.append(output.token_ids, output.text, output.logprobs)
        return self._terminal(output, self._history.whole())

    def failure(self) -> contract.Output:
        """The terminal of a stream that failed here and not in the engine."""
        return contract.Output(
            token_ids=[],
            text="",
            finish_reason=messages.FinishReason.ERROR,
            error=errors.make_error(errors.Code.INTERNAL),
            usage=self._usage(self._history.num_tokens),
            timings=_NO_TIMINGS,
        )

    def too_large(self, chunk: messages.Chunk) -> messages.Chunk:
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
            error=errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, _NOT_ONE if chunk.finish_reason else _NOT_EVEN_THIS),
        )

    def _usage(self, completion_tokens: int) -> messages.Usage:
        prompt = self._prompt_tokens
        return messages.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion_tokens,
            total_tokens=prompt + completion_tokens,
            cached_tokens=0,
        )

    def again(self, offset: int, max_bytes: int) -> Iterator[messages.Chunk]:
        """Everything said from a token on, and the terminal if there is one; an empty chunk if there is nothing."""
        chunks = 0
        if self.run.params.stream:
            end = self._history.num_tokens if self.terminal is None else self.terminal.offset
            for passage in self._history.since(offset, max_bytes, end):
                yield self._piece(passage)
                chunks += 1
        last = self.terminal or (None if chunks else self.head())
        if last is not None:
            yield last

    def _progress(self, progress: messages.Progress) -> messages.Chunk | None:
        head = self.head()
        return None if head is None else codec.replaced(head, progress=progress)

    def _piece(self, passage: Passage) -> messages.Chunk:
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=passage.offset,
            tokens=passage.num_tokens,
            text_offset=passage.text_offset,
            text=passage.text,
            token_ids=self._wanted_ids(passage.token_ids),
            logprobs=self._wanted_logprobs(passage.logprobs),
        )

    def _terminal(self, output: contract.Output, passage: Passage) -> messages.Chunk:
        reason, error = output.finish_reason, output.error
        if reason is messages.FinishReason.CANCELLED and self.end_with is not None:
            reason, error = messages.FinishReason.ERROR, self.end_with
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=passage.offset,
            tokens=passage.num_tokens,
            text_offset=passage.text_offset,
            text=passage.text,
            finish_reason=reason,
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
            token_ids=self._wanted_ids(passage.token_ids),
            logprobs=self._wanted_logprobs(passage.logprobs),
            usage=codec.given(output.usage),
            timings=codec.given(output.timings),
            stop_match=codec.given(output.stop_match),
            error=codec.given(error),
            routing=codec.given(self.run.routing),
        )

    def _wanted_ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        return token_ids if self.run.params.return_token_ids else UNSET

    def _wanted_logprobs(self, logprobs: list[contract.Logprob]) -> list[messages.TokenLogprob] | UnsetType:
        if self.run.params.logprobs is None:
            return UNSET
        return [self._named(one) for one in logprobs]

    def _named(self, one: contract.Logprob) -> messages.TokenLogprob:
        piece = self._pieces[one.token_id]
        top = [self._alternative(token_id, logprob) for token_id, logprob in one.top]
        text = piece.decode(errors="replace")
        return messages.TokenLogprob(id=one.token_id, text=text, bytes=list(piece), logprob=one.logprob, top=top)

    def _alternative(self, token_id: int, logprob: float) -> messages.TokenAlternative:
        piece = self._pieces[token_id]
        return messages.TokenAlternative(
            id=token_id, text=piece.decode(errors="replace"), bytes=list(piece), logprob=logprob
        )
