"""The stream of one accepted request: keeps what an engine puts out, and makes numbered chunks and one terminal of it.

The engine's side of the same request is a `Generation` (worker/engine_client). The engine contract lies between the
two: the generation turns tokens into outputs, whichever engine computes them, and the stream turns outputs into what
the client sees.

Three cursors say how far its tokens have come: all of them are sampled, those before `announced` are in the event log,
and those before `published` are with the client. Whatever makes a client lack something, such as a hold or a lost
message, moves `published` back, and nothing else: what is published again is made like what is published first."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.protocol.telemetry import long_waits, tracing
from tokenbus.protocol.telemetry.long_waits import BackoffTimer
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects
from tokenbus.protocol.wire.params import GenerationParams
from tokenbus.worker.broker.event_log import SampledTokens, last_of
from tokenbus.worker.contract import engine_output
from tokenbus.worker.kv_exchange.fetcher import Fetch
from tokenbus.worker.streams import prompt_scores, told_answer
from tokenbus.worker.streams.chunk_marks import ChunkMarks
from tokenbus.worker.streams.holds import Hold
from tokenbus.worker.streams.prompt_copies import MAX_COPIES, prompt_digest, without_prompt
from tokenbus.worker.streams.prompt_scores import PromptScoreBuffer
from tokenbus.worker.streams.replay_buffer import ReplayBuffer

LONG_PROMPT_S = 2.0
"""A prompt that takes longer is logged after this time, again each time it doubles, and when it is computed."""


class LongPrompt:
    """One prompt, from the first report of its progress. Times are seconds of one monotonic clock."""

    __slots__ = ("_began_at", "_began_tokens", "_is_logged", "_timer")

    def __init__(self, computed_tokens: int, now: float) -> None:
        self._began_at = now
        self._began_tokens = computed_tokens
        self._timer = BackoffTimer(LONG_PROMPT_S)
        self._is_logged = False

    def is_due(self, now: float, *, is_computed: bool) -> bool:
        """Returns whether to log now. The end is logged if anything was logged before."""
        if is_computed:
            is_due, self._is_logged = self._is_logged, False
            return is_due
        is_due = self._timer.is_due(now - self._began_at)
        self._is_logged |= is_due
        return is_due

    def seconds(self, now: float) -> float:
        """Returns the time since the first report."""
        return now - self._began_at

    def tokens_per_s(self, computed_tokens: int, now: float) -> float:
        """Returns the speed since the first report."""
        return (computed_tokens - self._began_tokens) / max(1e-3, self.seconds(now))


_ANNOUNCED_AT_ONCE = 256
"""The most tokens that are added to an entry of the event log, which is then seen to be full or not."""
_NO_TIMINGS = messages.Timings(queue_ms=0.0, prefill_ms=0.0, ttft_ms=0.0, decode_ms=0.0, total_ms=0.0)
_COMPLETE = (messages.FinishReason.STOP, messages.FinishReason.TOOL_CALLS)
_ANSWER_SIZE = "the whole answer does not fit one message: stream it"
_STEP_SIZE = "what one step brought does not fit one message of this broker: ask for fewer logprobs"


class WorkerStream:
    """Makes the chunks of one request; the outbox publishes them. Only this class counts offsets."""

    # with more than 30 attributes each instance would have a dictionary of its own, and 64 streams take 4 % more time
    __slots__ = (
        "_head", "_id", "_model", "_prompt_digest", "_prompt_published", "_prompt_scores", "_replay_buffer",
        "_token_bytes", "_wants_plain", "_worker_id", "accepted_at", "announced", "began_at",
        "cancel_error", "counts_prompt", "created", "deadline", "fetch", "first_token", "gaps", "guardian",
        "has_told_answer", "hash_scheme", "hold", "is_given_up", "is_open", "is_stranded", "is_streamed", "key",
        "last_chunk_at", "last_words", "long_prompt", "marks", "max_reasoning_tokens", "max_tokens", "named_guardian",
        "num_copies", "num_prompt_tokens", "num_resumed", "offered_at", "published", "replayed_at", "run", "sampling",
        "slow", "span", "stopped_by", "stranded_at", "stream_no", "terminal",
    )  # fmt: skip

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
        given = run.resume_from
        self.run = codec.replace(run, resume_from=given and codec.replace(given, token_ids=b"", logprobs=b""))
        """The run that started it here, without the resumed tokens, which are in the replay buffer."""
        self.guardian: str | None = run.router_id
        """The router that continues it if this worker is lost or leaves; None: there is none, empty: none can be."""
        self.named_guardian = run.router_id
        """The guardian that the event log has named last. It may be gone, or only stopping: then it still counts the
        stream's end."""
        self.is_stranded = False
        """Whether no engine of this worker can continue it, so that its guardian should take it."""
        self.last_words: engine_output.Output | None = None
        """The engine's last output for a stranded or taken stream, in case no worker continues it."""
        self.stranded_at = 0.0
        self.offered_at = 0.0
        """When it was last offered to a router."""
        self.num_prompt_tokens = len(run.token_ids) // 4
        self.counts_prompt = True
        """Whether its usage has the tokens of its prompt."""
        self.num_copies = 0
        """The requests whose prompts count with its own."""
        self._prompt_digest = b""
        self.is_streamed = run.params.is_streamed
        """Whether the client wants chunks before the terminal."""
        self.key = run.request_id
        self.stream_no = stream_no
        """The number by which the event log refers to it."""
        self.hold: Hold | None = None
        """While there is one, nothing may be published but probes."""
        self.is_given_up = False
        """Whether its client counts as gone."""
        self.marks = ChunkMarks(gone_subject)
        self._model = model
        self._worker_id = worker_id
        self._id = subjects.key_to_request_id(run.request_id)
        self._token_bytes = token_bytes
        self.hash_scheme = hash_scheme
        asked = run.params.logprobs
        self._replay_buffer = ReplayBuffer(None if asked is None else min(asked, len(token_bytes)))
        self._prompt_scores = _make_prompt_scores(run.params, token_bytes)
        """None if no log probabilities of the prompt are wanted."""
        self._wants_plain = self.is_streamed and asked is None and not run.params.return_token_ids
        self._wants_plain &= self._prompt_scores is None
        """Whether chunks between head and terminal carry text and nothing that the client has asked for."""
        self.announced = 0
        """The first token that is not in the event log."""
        self.published = 0
        """The first token that the client lacks."""
        self._prompt_published = 0
        """The first position of the prompt whose log probability the client lacks."""
        self._head: messages.Progress | UnsetType | None = None
        """The progress with which an empty chunk is due; None if none is."""
        self.num_resumed = 0
        """The number of tokens sampled before this run."""
        self.created = int(time.time())
        self.accepted_at = now
        self.began_at = now - (run.resume_from.elapsed_ms / 1e3 if run.resume_from else 0.0)
        """When the first worker accepted the request."""
        self.span = tracing.NOOP_SPAN
        self.long_prompt: LongPrompt | None = None
        """Decides when to log its prompt's progress, once that is known."""
        self.slow = long_waits.BackoffTimer(long_waits.FIRST_S)
        """Decides when to log again that the request waits for its first token."""
        self.deadline: asyncio.TimerHandle | None = None
        """Ends it when its time is over."""
        self.last_chunk_at = now
        """When the last chunk was made, in seconds of the caller's clock."""
        self.replayed_at = 0.0
        """When it was last replayed; 0 if never."""
        self.is_open = False
        """Whether it has been accepted and not yet forgotten."""
        self.max_tokens: int | None = None
        """The most tokens that it may have, once known."""
        self.sampling: messages.SamplingReport | UnsetType = UNSET
        """The parameters with which its tokens are sampled, if the client asked for them."""
        self.max_reasoning_tokens: int | None = None
        """The number of tokens after which its reasoning is closed, if limited."""
        self.first_token: internal.FirstToken | None = None
        """The statistics of its first token, if that token was sampled here."""
        self.fetch: Fetch | None = None
        """The fetch of blocks for its prompt, once that has ended."""
        self.gaps: list[int] = []
        """Once it has ended, how often the time between two outputs was below 1 ms, 2, 4, 8 and so on."""
        self.has_told_answer = False
        """Whether its guardian has got its answer, to say how the next turn begins."""
        self.terminal: messages.Chunk | None = None
        """The last chunk; once it is made, the stream accepts no more outputs."""
        self.cancel_error: errors.Error | None = None
        """The error that the terminal reports in place of `cancelled`, such as an expired deadline."""
        self.stopped_by: messages.StoppedBy | None = None
        """Who stopped it: the terminal then says so, with `length` in place of `cancelled`."""

    def __repr__(self) -> str:
        return f"<WorkerStream {self.key} attempt {self.run.attempt}: {self._replay_buffer.num_tokens} tokens>"

    def probe(self) -> tuple[messages.Chunk, str] | None:
        """Returns an empty chunk, and the reply subject by which its notice can be told from others; None if the client
        is to get only a terminal."""
        return (self._empty(self.published), self.marks.probe_subject) if self.is_streamed else None

    def is_replaced_by(self, run: internal.Run) -> bool:
        """Whether a run is a later attempt, whose router has given this one up without reaching the worker."""
        is_given_up = self.hold is not None or self.run.router_id == run.router_id
        return is_given_up and self.run.attempt < run.attempt and self.run.reply == run.reply

    @property
    def num_tokens(self) -> int:
        """The number of its sampled tokens, including those before this run."""
        return self._replay_buffer.num_tokens

    @property
    def first_token_sent(self) -> bool:
        """Whether any chunk holds, or will, a token that was sampled here."""
        return self.is_streamed and self._replay_buffer.num_tokens > self.num_resumed

    @property
    def num_tool_calls(self) -> int:
        """The number of tool calls that have begun."""
        return self._replay_buffer.num_calls

    @property
    def memory_bytes(self) -> int:
        """The approximate memory, in bytes, that the stream takes once it has ended."""
        scores = 0 if self._prompt_scores is None else self._prompt_scores.memory_bytes
        return 4_096 + self._replay_buffer.memory_bytes + scores

    def shed(self) -> None:
        """Lets go of all that is not needed to replay the stream once it has ended, such as tools and constraints."""
        if self.run.copy_of:
            self._note_prompt()
        asked = self.run.params
        kept = GenerationParams(stream=asked.stream, logprobs=asked.logprobs, return_token_ids=asked.return_token_ids)
        self.run = codec.replace(self.run, token_ids=b"", params=kept, routing=None, routing_options=None)
        self.last_words, self.span = None, tracing.NOOP_SPAN

    def note_first(self, find: "Callable[[str], WorkerStream | None]") -> None:
        """Counts no tokens of its prompt if the request that is named as the first one has the same, has computed it
        here, and counts it."""
        run = self.run
        if not run.copy_of or run.params.cache_prompt is False:
            return
        first = find(subjects.request_key(subjects.key_to_tenant(self.key), run.copy_of))
        if first is not None and first.key != self.key and first.may_have_copies:
            self.counts_prompt = first._note_prompt() != self._note_prompt()
            first.num_copies += not self.counts_prompt

    @property
    def may_have_copies(self) -> bool:
        """Whether other requests' prompts may count with its own, which somebody pays for."""
        is_paid = self.first_token is not None and (self.terminal is None or not self.terminal.error)
        return is_paid and self.counts_prompt and self.num_copies < MAX_COPIES

    def _note_prompt(self) -> bytes:
        """Returns the digest of its prompt, which is kept: the prompt is not, once it has ended."""
        if not self._prompt_digest:
            self._prompt_digest = prompt_digest(self.run)
        return self._prompt_digest

    def _counted(self, usage: messages.Usage) -> messages.Usage:
        return usage if self.counts_prompt else without_prompt(usage)

    @property
    def prompt_offset(self) -> int | UnsetType:
        """The position of the prompt's next token whose log probability is to be published.

        Where the stream continues one of another worker, its client has them all: they are computed again only in case
        it has lost some."""
        if self._prompt_scores is None:
            return UNSET
        return self.num_prompt_tokens if self.num_resumed else self._prompt_scores.end

    def resume(self, output: engine_output.Output) -> None:
        """Takes the tokens that the client already has from another worker, so that they can be replayed."""
        assert output.resumed_texts is not None, output
        self._replay_buffer.append_resumed(
            output.token_ids, output.resumed_texts, output.logprobs, output.resumed_parts
        )
        self.num_resumed = self.announced = self.published = self._replay_buffer.num_tokens
        self._prompt_published = self.num_prompt_tokens

    def show(self, progress: messages.Progress | UnsetType = UNSET) -> None:
        """Makes an empty chunk due, which opens the stream or shows that it is alive."""
        self._head = progress or self._head or UNSET

    def take(self, output: engine_output.Output) -> None:
        """Takes an engine's output. If that fails, nothing of it is kept."""
        buffer = self._replay_buffer
        if output.is_plain and self._wants_plain:
            buffer.append_text(output.token_ids, output.text)
            return
        if output.prompt_logprobs:
            assert self._prompt_scores is not None, output
            self._prompt_scores.append(output.prompt_logprobs)
            return
        if output.progress is not None:
            self.show(output.progress)
            return
        if output.first_token is not None:
            account = msgspec.structs.asdict(output.first_token)
            self.first_token = internal.FirstToken(stream_no=self.stream_no, max_tokens=self.max_tokens, **account)
        if output.finish_reason is not None:
            self.terminal = self._terminal(output)
            return
        # a client could not ask again for lost text that comes without a token
        assert output.token_ids or not (output.text or output.reasoning or output.tool_calls), output
        self._append(output)

    def plain_chunk(self, max_bytes: int) -> messages.Chunk | None:
        """Returns the chunk with what its client lacks, if that is just text that is sure to fit, as nearly always."""
        if not self._wants_plain or self._head is not None or self.terminal is not None:
            return None
        found = self._replay_buffer.plain_text(self.published, max_bytes)
        if found is None:
            return None
        tokens, text_offset, text = found
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=self.published,
            tokens=tokens,
            text_offset=text_offset,
            text=text,
        )

    def unpublished(self, max_bytes: int) -> Iterator[messages.Chunk]:
        """Yields what its client lacks in chunks of at most `max_bytes`, or of one token, and the terminal if there is
        one; if there is nothing else, the empty chunk that is due."""
        buffer, start = self._replay_buffer, self.published
        if not self.is_streamed:
            if self.terminal is not None:
                yield self.terminal
            return
        chunks = 0
        if self._head:
            yield self._opening()
            chunks += 1
        if self._prompt_scores is not None:
            empty = self._empty(start)
            most = min(max_bytes, prompt_scores.MAX_CHUNK_BYTES)
            for part in self._prompt_scores.parts(self._prompt_published, most):
                yield codec.replace(empty, prompt_offset=part.offset, prompt_logprobs=part.logprobs)
                chunks += 1
        # the terminal's own tokens are in the terminal
        for segment in buffer.segments(start, max_bytes, None if self.terminal is None else self.terminal.offset):
            yield self._chunk(*segment)
            chunks += 1
        if self.terminal is not None:
            yield self.terminal
        elif self._head is UNSET and not chunks:
            yield self._opening()

    def _opening(self) -> messages.Chunk:
        """Returns the empty chunk that is due."""
        return codec.replace(
            self._empty(self.published),
            hash_scheme=self.hash_scheme,
            progress=self._head or UNSET,
            sampling=self.sampling,
            rate_limits=codec.unset_if_none(self.run.rate_limits),
        )

    def flushed(self, chunks: Sequence[messages.Chunk]) -> None:
        """Notes that its tokens are in the event log, and that these chunks were published."""
        self.announced = len(self._replay_buffer.token_ids)
        for chunk in chunks:
            self._head = None
            self.marks.sent(chunk)
            if chunk.prompt_logprobs:
                self._prompt_published = (chunk.prompt_offset or 0) + len(chunk.prompt_logprobs)
            else:
                self.published = max(self.published, chunk.offset + chunk.tokens)

    def lacks(self, offset: int, prompt_offset: int | None) -> None:
        """Notes that its client lacks the tokens from `offset` on, and the log probabilities of its prompt from
        `prompt_offset` on, unless that is None. Notices about what is published again will be ignored."""
        self.published = max(min(self.published, offset), self._replay_buffer.first)
        if prompt_offset is not None:
            self._prompt_published = min(self._prompt_published, prompt_offset)
        self.marks.forget(offset, prompt_offset)

    def skip(self) -> None:
        """Lets its client do without what it lacks."""
        self.published = self._replay_buffer.num_tokens
        if self._prompt_scores is not None:
            self._prompt_published = max(self._prompt_published, self._prompt_scores.end)

    def announce(self, sampled: list[SampledTokens]) -> None:
        """Adds the tokens that are not in the event log to the last of `sampled`, or to more of them."""
        buffer, start = self._replay_buffer, self.announced
        end = len(buffer.token_ids)
        first = self.first_token if start == self.num_resumed else None
        if self._wants_plain and first is None and end - start == 1:  # nearly always
            last_of(sampled).add(self.stream_no, (buffer.token_ids[start],), b"", None)
            return
        while start < end:
            stop = min(end, start + _ANNOUNCED_AT_ONCE)
            logprobs = buffer.packed_logprobs(start, stop)
            last_of(sampled).add(self.stream_no, buffer.token_ids[start:stop], logprobs, first)
            start, first = stop, None

    def state(self, known_tokens: int | None) -> internal.StreamState:
        """Returns the stream so far, with the tokens after the first `known_tokens`; with none if that is None. All its
        tokens must have been published."""
        buffer, end = self._replay_buffer, self._replay_buffer.num_tokens
        start = end if known_tokens is None else max(0, known_tokens)
        return internal.StreamState(
            num_tokens=end,
            token_ids=buffer.packed_token_ids(start, end),
            logprobs=buffer.packed_logprobs(start, end),
            first_token=self.first_token,
        )

    def snapshot(self, known_tokens: int | None) -> internal.RunningRequest:
        """Returns the stream as a snapshot lists it, with its `state`."""
        return internal.RunningRequest(
            id=self.key,
            attempt=self.run.attempt,
            stream_no=self.stream_no,
            router_id=self.guardian or "",
            **msgspec.structs.asdict(self.state(known_tokens)),
        )

    def strand(self, output: engine_output.Output, now: float) -> bool:
        """Keeps the terminal with which the engine gives up a stranded stream. Returns False for any other output."""
        if not self.is_stranded or output.error is None or output.error.code is not errors.Code.WORKER_LOST:
            return False
        self.last_words, self.stranded_at = output, now
        return True

    def say_last_words(self, output: engine_output.Output, max_bytes: int) -> messages.Chunk | None:
        """Returns the terminal for a stream that was given up, in case no worker continues it; None if it has no token,
        or more than `max_bytes`. `output` is the engine's last output for it."""
        if not self.num_tokens:
            return None
        self.stopped_by = messages.StoppedBy.SHUTDOWN
        terminal = self._terminal(output)
        return terminal if len(codec.encode(terminal, self.run.encoding)) <= max_bytes else None

    def to_run(self, now: float) -> internal.Run:
        """Returns a run that continues the stream from here on."""
        so_far, first = self.state(0), self.first_token or self.run.resume_from
        age_s = now - self.began_at
        elapsed_ms = (now - self.accepted_at) * 1e3
        left_ms = None if self.run.remaining_ms is None else max(1.0, self.run.remaining_ms - elapsed_ms)
        age_ms = (self.run.age_ms or 0.0) + elapsed_ms
        return codec.replace(
            self.run,
            params=codec.replace(self.run.params, max_tokens=self.max_tokens),
            remaining_ms=left_ms,
            age_ms=age_ms,
            resume_from=internal.RunResume.of(so_far.token_ids, so_far.logprobs, first, age_s * 1e3),
        )

    def start_report(self, prompt_tokens: int) -> internal.Started:
        """Tells routers that the stream is open."""
        return internal.Started(
            id=self.key,
            stream_no=self.stream_no,
            attempt=self.run.attempt,
            prompt_tokens=prompt_tokens,
            router_id=self.run.router_id,
        )

    def end_report(self, terminal: messages.Chunk, *, tells_answer: bool = False) -> internal.StreamEnd:
        """Returns what the stream's terminal says, for its guardian, with the whole answer if it wants that."""
        assert terminal.finish_reason is not None
        usage, timings = terminal.usage or None, terminal.timings or _NO_TIMINGS
        return internal.StreamEnd(
            id=self.key,
            router_id=self.named_guardian,
            finish_reason=terminal.finish_reason,
            code=str(terminal.error.code) if terminal.error else "",
            prompt_tokens=usage.prompt_tokens if usage else self.num_prompt_tokens * self.counts_prompt,
            cached_tokens=usage.cached_tokens if usage else 0,
            completion_tokens=usage.completion_tokens if usage else self.num_tokens,
            queue_ms=timings.queue_ms,
            prefill_ms=timings.prefill_ms,
            fetched_tokens=timings.fetched_tokens or 0,
            fetch_ms=timings.fetch_ms or 0.0,
            gaps=self.gaps,
            answer=self._answer(terminal) if tells_answer and self.run.wants_answer else None,
        )

    def _answer(self, terminal: messages.Chunk) -> messages.ChatMessage | None:
        """Returns the whole answer, if it is complete, has reasoning, and is not too long."""
        buffer = self._replay_buffer
        if terminal.finish_reason not in _COMPLETE or buffer.first:  # what is before that is not known here
            return None
        whole = buffer.segment(0, buffer.end)
        if not whole.reasoning:
            return None
        answer = told_answer.to_message(whole, with_reasoning=self.run.wants_reasoning)
        self.has_told_answer = len(codec.encode(answer)) <= limits.MAX_TOLD_ANSWER_BYTES
        return answer if self.has_told_answer else None

    def fail(self) -> messages.Chunk:
        """Ends the stream with an error, because of a bug; returns the terminal, which has no text."""
        self.announced = self.num_tokens  # routers need no more of it
        if self.is_streamed:
            last = self._empty(self.published)
        else:
            last = codec.replace(self._empty(0), tokens=self.num_tokens)
        self.terminal = self._error_terminal(last, errors.make_error(errors.Code.INTERNAL))
        return self.terminal

    def too_large(self, chunk: messages.Chunk) -> messages.Chunk:
        """Returns the terminal to publish in place of a chunk that is larger than the broker allows. It ends the
        stream, unless that has ended: then an earlier broker has accepted the chunk."""
        problem = _ANSWER_SIZE if chunk.finish_reason else _STEP_SIZE
        terminal = self._error_terminal(chunk, errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, problem))
        self.terminal = terminal if self.is_open else self.terminal
        return terminal

    def _error_terminal(self, chunk: messages.Chunk, error: errors.Error) -> messages.Chunk:
        """Returns an error terminal that takes the place of a chunk."""
        prompt, completion = self.num_prompt_tokens, chunk.offset + chunk.tokens
        usage = messages.Usage(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion, cached_tokens=0
        )
        return codec.replace(
            self._empty(chunk.offset),
            tokens=chunk.tokens,
            finish_reason=messages.FinishReason.ERROR,
            usage=chunk.usage or self._counted(usage),
            timings=chunk.timings or _NO_TIMINGS,
            error=error,
        )

    def _empty(self, offset: int) -> messages.Chunk:
        """Returns a chunk without tokens that names the worker."""
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=offset,
            text_offset=self._replay_buffer.text_offset(offset),
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
            prompt_offset=self.prompt_offset,
        )

    def _append(self, output: engine_output.Output) -> None:
        self._replay_buffer.append(output.token_ids, output.text, output.logprobs, output.reasoning, output.tool_calls)

    def _chunk(
        self,
        offset: int,
        num_tokens: int,
        text_offset: int,
        text: str,
        token_ids: list[int],
        logprobs: list[engine_output.Logprob],
        reasoning_offset: int,
        reasoning: str,
        tool_calls: Sequence[messages.ToolCallDelta],
    ) -> messages.Chunk:
        """Returns a chunk with tokens and all that came with them: the fields of a `Segment`."""
        asked = self.run.params
        return messages.Chunk(
            id=self._id,
            attempt=self.run.attempt,
            offset=offset,
            tokens=num_tokens,
            text_offset=text_offset,
            text=text,
            token_ids=token_ids if asked.return_token_ids else UNSET,
            logprobs=UNSET if asked.logprobs is None else self._named_logprobs(logprobs),
            reasoning_offset=reasoning_offset if reasoning else UNSET,
            reasoning=reasoning or UNSET,
            tool_calls=list(tool_calls) if tool_calls else UNSET,
            prompt_offset=self.prompt_offset,
        )

    def _terminal(self, output: engine_output.Output) -> messages.Chunk:
        self.gaps = output.gaps
        start = self.num_tokens if self.is_streamed else 0  # if nothing was streamed, it carries the whole completion
        self._append(output)
        last = self._chunk(*self._replay_buffer.segment(start, self._replay_buffer.end))
        if self._prompt_scores is not None and not self.is_streamed:
            for part in self._prompt_scores.parts(0):
                last = codec.replace(last, prompt_offset=part.offset, prompt_logprobs=part.logprobs)
        reason, error = output.finish_reason, output.error
        stopped_by: messages.StoppedBy | UnsetType = UNSET
        if reason is messages.FinishReason.CANCELLED and self.cancel_error is not None:
            reason, error = messages.FinishReason.ERROR, self.cancel_error
        elif reason is messages.FinishReason.CANCELLED and self.stopped_by is not None:
            reason, stopped_by = messages.FinishReason.LENGTH, self.stopped_by
        return codec.replace(
            last,
            finish_reason=reason,
            worker_id=self._worker_id,
            model=self._model,
            created=self.created,
            sampling=self.sampling,
            usage=UNSET if output.usage is None else self._counted(output.usage),
            timings=self._timings(output),
            stop_match=codec.unset_if_none(output.stop_match),
            stopped_by=stopped_by,
            error=codec.unset_if_none(error),
            routing=codec.unset_if_none(self.run.routing),
            rate_limits=UNSET if self.is_streamed else codec.unset_if_none(self.run.rate_limits),
        )

    def _timings(self, output: engine_output.Output) -> messages.Timings | UnsetType:
        if output.timings is None or self.fetch is None:
            return codec.unset_if_none(output.timings)
        cached = output.usage.cached_tokens if output.usage is not None else 0
        return codec.replace(
            output.timings,
            fetched_tokens=min(max(0, cached - self.fetch.num_held), self.fetch.num_tokens),
            fetch_ms=round(self.fetch.seconds * 1e3, 3),
        )

    def fetched(self, fetch: Fetch) -> internal.Fetched:
        """Notes that blocks were fetched, and returns what routers must learn about it."""
        assert self.run.fetch_from is not None
        self.fetch = fetch
        return internal.Fetched(
            stream_no=self.stream_no,
            worker_id=self.run.fetch_from.worker_id,
            fetched_tokens=fetch.num_tokens,
            fetched_bytes=fetch.num_bytes,
            fetch_ms=fetch.seconds * 1e3,
            was_leg=self.run.fetch_from.leg_ms > 0,
        )

    def _named_logprobs(self, logprobs: list[engine_output.Logprob]) -> list[messages.TokenLogprob]:
        """Returns log probabilities with the texts of their tokens."""
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


def _make_prompt_scores(params: GenerationParams, token_bytes: Sequence[bytes]) -> PromptScoreBuffer | None:
    if params.prompt_logprobs is None:
        return None
    count = min(params.prompt_logprobs, len(token_bytes))
    return PromptScoreBuffer(count, params.prompt_logprobs_from or 0, token_bytes)
