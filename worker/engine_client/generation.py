"""The engine client's side of one accepted request: turns sampled tokens into outputs and exactly one terminal.

It outlives an engine: when one dies, the next gets the prompt and the tokens sampled so far, and continues. A
completion that another worker began continues in the same way."""

import asyncio
import time
from array import array
from collections.abc import Sequence

from tokenbus.protocol.wire import codec, errors, limits, messages
from tokenbus.protocol.wire.traces import GAP_BUCKETS
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.engine.process.ipc import SequenceOutput
from tokenbus.worker.engine.scheduling.plan import ScoredTokens
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason
from tokenbus.worker.engine_client.reader import CompletionReader, Ending

_FAILURES = {
    EngineFinishReason.INSUFFICIENT_MEMORY: errors.make_error(errors.Code.INSUFFICIENT_MEMORY),
    EngineFinishReason.BAD_LOGITS: errors.make_error(
        errors.Code.INTERNAL, "the model computed logits that are not numbers"
    ),
    EngineFinishReason.ABORTED: errors.make_error(errors.Code.INTERNAL, "the engine aborted the request"),
    EngineFinishReason.FAILED: errors.make_error(errors.Code.INTERNAL, "the engine could not start the request"),
}


_MAX_RESUME_S = 0.8 * limits.ACCEPT_TIMEOUT_S
"""The time for reading resumed tokens. It blocks the event loop, and an accept that comes later comes too late: the
router asks the next worker, and one that stands still for three times as long gives up all its streams. Most tokens
take 5 microseconds, those of many small tool calls 25."""
_TOO_COSTLY = "could not be followed to its end; make it simpler or less ambiguous"


class Generation:
    """Turns tokens into outputs for `sink`. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        request: engine_request.EngineRequest,
        sink: engine_output.Sink,
        reader: CompletionReader,
        accepted_at: float,
    ) -> None:
        self.request = request
        self._sink = sink
        self._reader = reader
        self.accepted_at = accepted_at
        self._elapsed_ms = 0.0
        """The completion's age when it was accepted here."""
        self.started_at: float | None = None
        """When the first engine started to compute it, which ended its queue time."""
        self._first_token: engine_output.FirstTokenStats | None = None
        self.last_token_at: float | None = None
        self.gaps = [0] * GAP_BUCKETS
        """The number of times between two outputs below 1 ms, 2, 4, 8 and so on."""
        self.sampled = array("I")
        """The tokens that another engine needs after the prompt to continue."""
        self.crashes = 0
        """The number of engines that died in a step with this request since its last token."""
        self.has_ended = False
        """Whether its sink has received the terminal."""
        self._is_constraint_ready = False
        """Whether its sink knows that the constraint is compiled; another engine compiles it again."""
        self._sink_failed = False
        self._processed_tokens = -1
        self.logprobs_from: int | None = None
        """The position of the prompt's next token whose log probability is wanted; None if none is."""
        if request.sampling.prompt_logprobs is not None:
            self.logprobs_from = request.sampling.prompt_logprobs_from or 0

    def __repr__(self) -> str:
        return f"<Generation {self.request.key}: {self._reader.num_tokens} tokens>"

    @property
    def is_complete(self) -> bool:
        """Whether it ran to its end: to a stop, or to its full length."""
        return self._reader.ending is not None

    def resume(self, end_token_ids: Sequence[int]) -> None:
        """Resumes the completion that the request continues: hands out its tokens, with their text.

        Raises RequestError, and hands out nothing, if the completion ends before the last of them, or can't be read, or
        not fast enough. If it ends with the last one, it is complete: call `end_resumed`, and give it to no engine."""
        resumed = self.request.resumed
        if resumed is None:
            return
        try:
            began = time.monotonic()
            texts, parts = self._reader.read_resumed(
                resumed.token_ids, end_token_ids, lambda: time.monotonic() - began > _MAX_RESUME_S
            )
        except errors.RequestError:
            raise
        except Exception as error:  # a bug in reading its tokens: its router gets an answer all the same
            self._report(f"the tokens of {self.request.key} could not be read", error)
            raise errors.request_error(errors.Code.INTERNAL) from None
        self.sampled.extend(resumed.token_ids)
        self._elapsed_ms, self._first_token = resumed.elapsed_ms, resumed
        whole = engine_output.Output(
            token_ids=list(resumed.token_ids),
            text="".join(texts),
            logprobs=resumed.logprobs,
            resumed_texts=texts,
            resumed_parts=parts,
        )
        self._sink(whole)

    def end_resumed(self, now: float) -> None:
        """Ends a generation that was complete with the request's last resumed token."""
        try:
            self._complete(engine_output.Output(), now)
        except Exception as error:  # a bug in reading its tokens
            self._break_off(error, now)

    def progress(self, processed_tokens: int, cached_tokens: int) -> bool:
        """Hands out the prompt's progress, if it has changed and is wanted; returns whether the sink failed."""
        # steps may report the same progress again
        if processed_tokens == self._processed_tokens or not self.request.return_progress:
            return False
        self._processed_tokens = processed_tokens
        seen = messages.Progress(
            prompt_tokens=len(self.request.token_ids), processed_tokens=processed_tokens, cached_tokens=cached_tokens
        )
        self._hand_out(engine_output.Output(progress=seen))
        return self._sink_failed

    def scored(self, tokens: ScoredTokens) -> bool:
        """Hands out log probabilities of the prompt; returns whether the sink failed. An engine begins where the one
        before it has ended, so they come in order and once."""
        assert self.logprobs_from == tokens.first, (self, tokens.first)
        self.logprobs_from = tokens.end
        first, count, packed = tokens.first, tokens.num_tokens, tokens.packed
        self._hand_out(engine_output.Output(prompt_offset=first, num_scored=count, prompt_logprobs=packed))
        return self._sink_failed

    def constraint_ready(self) -> bool:
        """Reports that the constraint is compiled, unless it has been reported; returns whether the sink failed."""
        if not self._is_constraint_ready:
            self._is_constraint_ready = True
            self._hand_out(engine_output.Output(is_constraint_ready=True))
        return self._sink_failed

    def advance(self, output: SequenceOutput, now: float) -> bool:
        """Takes a step's output; returns whether the generation has ended, possibly before the engine knows."""
        num_before = len(self.sampled)
        try:
            return self._advance(output, now)
        except Exception as error:  # a bug in reading its tokens ends this generation, never its neighbours' step
            del self.sampled[num_before:]  # nobody got them
            self._reader.forget_after(num_before)
            self._break_off(error, now)
            return True

    def _advance(self, output: SequenceOutput, now: float) -> bool:
        if not output.token_ids:
            assert output.finish_reason is not None
            self.fail(self._failure(output.finish_reason), now)
            return True
        # it survived a step, so earlier crashes were not its fault
        self.crashes = 0
        self.last_token_at = now
        first_token = None
        if self._first_token is None:
            first_token = self._first_token = self._account(now, output.cached_tokens or 0)
        reader = self._reader
        if self.request.is_warm_up:  # the token was sampled only because every prompt ends with one
            reader.ending = Ending(messages.FinishReason.LENGTH)
            self._complete(engine_output.Output(), now)
            return True
        token_ids, logprobs = output.token_ids, output.logprobs
        text, count = reader.read(token_ids, output.finish_reason)
        if count < len(token_ids):
            token_ids, logprobs = token_ids[:count], logprobs[:count]
        self.sampled.extend(token_ids)
        is_last = reader.ending is not None
        made = engine_output.Output(
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            first_token=first_token,
            is_plain=reader.is_plain and first_token is None and not logprobs and not is_last,
        )
        if not is_last:
            self._hand_out(made)
            return self.has_ended or self._sink_failed  # its sink may have cancelled it
        self._complete(made, now)
        return True

    def cancel(self, now: float) -> None:
        try:
            held = self._reader.cut_off()
        except Exception as error:  # a bug in reading its tokens
            self._break_off(error, now)
            return
        self._finish(engine_output.Output(text=held, finish_reason=messages.FinishReason.CANCELLED), now)

    def fail(self, error: errors.Error, now: float) -> None:
        """Ends it with an error: its engine is gone, or its constraint can't be compiled."""
        self._finish(engine_output.Output(finish_reason=messages.FinishReason.ERROR, error=error), now)

    def _break_off(self, error: Exception, now: float) -> None:
        """Ends it because of a bug."""
        self._report(f"the tokens of {self.request.key} could not be read", error)
        if not self.has_ended:
            self.fail(errors.make_error(errors.Code.INTERNAL), now)

    def _report(self, problem: str, error: Exception) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": problem, "exception": error})

    def _complete(self, last: engine_output.Output, now: float) -> None:
        reason, stop_match, text = self._reader.end()
        self._finish(codec.replace(last, text=last.text + text, finish_reason=reason, stop_match=stop_match), now)

    def _failure(self, reason: EngineFinishReason) -> errors.Error:
        constraint = self.request.constraint
        if reason is EngineFinishReason.CONSTRAINT_FAILED and constraint is not None:
            return errors.invalid_field(constraint.param, _TOO_COSTLY).error
        return _FAILURES[reason]

    def _finish(self, terminal: engine_output.Output, now: float) -> None:
        """Hands out the terminal, with usage and timings."""
        assert not self.has_ended, self
        self.has_ended = True
        terminal = codec.replace(terminal, usage=self._usage(), timings=self._timings(now), gaps=self.gaps)
        self._hand_out(terminal)

    def _hand_out(self, output: engine_output.Output) -> None:
        """Gives an output to the sink, with the reasoning and tool calls read since the last one."""
        if self._reader.has_parts:
            reasoning, tool_calls = self._reader.take_parts()
            output = codec.replace(output, reasoning=reasoning, tool_calls=tool_calls)
        try:
            self._sink(output)
        except Exception as error:  # a bug in one sink ends its own stream, never its neighbours' step
            self._sink_failed = True
            self._report(f"the sink of {self.request.key} failed", error)

    def _usage(self) -> messages.Usage:
        prompt, completion = len(self.request.token_ids), self._reader.num_tokens
        return messages.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            cached_tokens=0 if self._first_token is None else self._first_token.cached_tokens,
            reasoning_tokens=self._reader.reasoning_tokens,
        )

    def _account(self, now: float, cached_tokens: int = 0) -> engine_output.FirstTokenStats:
        """Returns the account of how it reached its first token, if that came now."""
        started = now if self.started_at is None else self.started_at
        return engine_output.FirstTokenStats(
            cached_tokens=cached_tokens, queue_ms=_ms(started - self.accepted_at), prefill_ms=_ms(now - started)
        )

    def _timings(self, now: float) -> messages.Timings:
        first = self._first_token or self._account(now)
        ttft_ms = round(first.queue_ms + first.prefill_ms, 3)
        total_ms = max(ttft_ms, round(self._elapsed_ms + _ms(now - self.accepted_at), 3))
        return messages.Timings(
            queue_ms=first.queue_ms,
            prefill_ms=first.prefill_ms,
            ttft_ms=ttft_ms,
            decode_ms=round(total_ms - ttft_ms, 3),
            total_ms=total_ms,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
