"""The engine client's side of one accepted request: turns sampled tokens into outputs and exactly one terminal.

It outlives an engine: when one dies, the next gets the prompt and the tokens sampled so far, and continues. A
completion that another worker began continues in the same way: its tokens are turned into text again, so that all that
depends on them, such as held-back text, is as if they had been sampled here."""

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET

from tokenbus.protocol.wire import codec, errors, limits, messages
from tokenbus.protocol.wire.traces import GAP_BUCKETS
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.engine.process.ipc import SequenceOutput
from tokenbus.worker.engine.scheduling.plan import ScoredTokens
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, FinishRule
from tokenbus.worker.engine_client.answer_reader import AnswerReader
from tokenbus.worker.engine_client.detokenizer import Detokenizer

_FAILURES = {
    EngineFinishReason.INSUFFICIENT_MEMORY: errors.make_error(errors.Code.INSUFFICIENT_MEMORY),
    EngineFinishReason.BAD_LOGITS: errors.make_error(
        errors.Code.INTERNAL, "the model computed logits that are not numbers"
    ),
    EngineFinishReason.ABORTED: errors.make_error(errors.Code.INTERNAL, "the engine aborted the request"),
    EngineFinishReason.FAILED: errors.make_error(errors.Code.INTERNAL, "the engine could not start the request"),
}


_TOO_COSTLY = "could not be followed to its end; make it simpler or less ambiguous"
_MAX_RESUME_S = 0.8 * limits.ACCEPT_TIMEOUT_S
"""The time for reading resumed tokens. It blocks the event loop, and an accept that comes later comes too late: the
router asks the next worker, and one that stands still for three times as long gives up all its streams. Most tokens
take 5 microseconds, those of many small tool calls 25."""
_TOKENS_AT_ONCE = 2_048
"""Resumed tokens that are read before the time is checked."""


class _Ending(NamedTuple):
    """The way in which a token completes a generation, and the text that was held back until then."""

    finish_reason: messages.FinishReason
    stop_match: str | int | None = None
    held_text: str = ""


class Generation:
    """Turns tokens into outputs for `sink`. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        request: engine_request.EngineRequest,
        sink: engine_output.Sink,
        token_bytes: Sequence[bytes],
        accepted_at: float,
        reader: AnswerReader | None = None,
    ) -> None:
        """`reader` separates reasoning and tool calls from the text; without one, all is text."""
        self.request = request
        self._sink = sink
        self._detokenizer = Detokenizer(token_bytes, request.stop, request.sampling.min_tokens)
        self._reader = reader
        self._is_plain = reader is None and not request.stop
        """Whether a token adds its text and nothing else, unless it is the last one."""
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
        self._ending: _Ending | None = None
        self._is_constraint_ready = False
        """Whether its sink knows that the constraint is compiled; another engine compiles it again."""
        self._sink_failed = False
        self._processed_tokens = -1
        self.logprobs_from: int | None = None
        """The position of the prompt's next token whose log probability is wanted; None if none is."""
        if request.sampling.prompt_logprobs is not None:
            self.logprobs_from = request.sampling.prompt_logprobs_from or 0

    def __repr__(self) -> str:
        return f"<Generation {self.request.key}: {self._detokenizer.num_tokens} tokens>"

    @property
    def is_complete(self) -> bool:
        """Whether it ran to its end: to a stop, or to its full length."""
        return self._ending is not None

    def resume(self, end_token_ids: Sequence[int]) -> None:
        """Resumes the completion that the request continues: hands out its tokens, with their text.

        Raises RequestError, and hands out nothing, if the completion ends before the last of them, or can't be read, or
        not fast enough. If it ends with the last one, it is complete: call `end_resumed`, and give it to no engine."""
        resumed = self.request.resumed
        if resumed is None:
            return
        constrained = self.request.constraint is not None
        rule = FinishRule(self.request.sampling, end_token_ids, constrained=constrained)
        parts: dict[int, engine_output.AnswerParts] = {}
        try:
            if self._reader is None:
                texts = self._add_resumed(resumed.token_ids, rule)
            else:
                texts, parts = self._read_resumed(resumed.token_ids, rule)
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
            self._detokenizer.num_tokens = num_before
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
        if self.request.is_warm_up:  # the token was sampled only because every prompt ends with one
            self._ending = _Ending(messages.FinishReason.LENGTH)
            self._complete(engine_output.Output(), now)
            return True
        token_ids, logprobs = output.token_ids, output.logprobs
        if self._is_plain and len(token_ids) == 1 and output.finish_reason is None:  # nearly always
            text, count = self._detokenizer.decode(token_ids[0]), 1
        else:
            text, count = self._add_texts(token_ids, output.finish_reason)
        if count < len(token_ids):
            token_ids, logprobs = token_ids[:count], logprobs[:count]
        self.sampled.extend(token_ids)
        made = engine_output.Output(
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            first_token=first_token,
            is_plain=self._is_plain and first_token is None and not logprobs and self._ending is None,
        )
        if self._ending is None:
            self._hand_out(made)
            return self.has_ended or self._sink_failed  # its sink may have cancelled it
        self._complete(made, now)
        return True

    def cancel(self, now: float) -> None:
        try:
            held = self._rest(self._detokenizer.flush(), cut_off=True)
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

    def _add_resumed(self, token_ids: Sequence[int], rule: FinishRule) -> list[str]:
        """Counts the given tokens and returns the text that came with each. Only the last of them may complete the
        generation; otherwise raises RequestError.

        All of it blocks the worker's event loop, so the work per token matters: there may be 100,000."""
        before, last = token_ids[:-1], token_ids[-1]
        texts: list[str] = []
        began_s = time.monotonic()
        for at in range(0, len(before), _TOKENS_AT_ONCE):
            some = before[at : at + _TOKENS_AT_ONCE]
            texts += self._detokenizer.push_all(some)
            if len(texts) < at + len(some):  # a stop string is complete
                break
            _check_time(began_s, len(texts), token_ids)
        finishing = (place for place, token_id in enumerate(before) if rule.finish_reason(token_id, place + 1))
        place = min(len(texts), next(finishing, len(before)))
        if place < len(before):
            raise _ends_early(place, token_ids)
        text, self._ending = self._add_text(last, rule.finish_reason(last, len(token_ids)))
        return [*texts, text]

    def _read_resumed(
        self, token_ids: Sequence[int], rule: FinishRule
    ) -> tuple[list[str], dict[int, engine_output.AnswerParts]]:
        """Does the same for a parsed answer; also returns what else came with tokens."""
        assert self._reader is not None
        texts: list[str] = []
        parts: dict[int, engine_output.AnswerParts] = {}
        began_s = time.monotonic()
        for place, token_id in enumerate(token_ids):
            if self._ending is not None:
                raise _ends_early(place - 1, token_ids)
            if place % _TOKENS_AT_ONCE == 0:
                _check_time(began_s, place, token_ids)
            text, self._ending = self._add_text(token_id, rule.finish_reason(token_id, place + 1))
            texts.append(text)
            if self._reader.has_parts:
                parts[place] = self._reader.take_parts()
        return texts, parts

    def _add_texts(self, token_ids: list[int], finish_reason: EngineFinishReason | None) -> tuple[str, int]:
        """Counts tokens up to the one that completes the generation; returns their text and number."""
        text, last = "", len(token_ids) - 1
        for place, token_id in enumerate(token_ids):
            more, self._ending = self._add_text(token_id, finish_reason if place == last else None)
            text += more
            if self._ending is not None:
                return text, place + 1
        return text, len(token_ids)

    def _add_text(self, token_id: int, finish_reason: EngineFinishReason | None) -> tuple[str, _Ending | None]:
        """Counts a token; returns the text that may be published now, and how the token completes the generation."""
        if finish_reason is EngineFinishReason.STOP_TOKEN:
            self._detokenizer.count_hidden_token()
            return "", _Ending(messages.FinishReason.STOP, token_id, self._detokenizer.flush())
        if self._reader is None:
            text, stop = self._detokenizer.push(token_id)
        elif self._reader.is_marker(token_id):
            # held-back text precedes the marker, and no stop string contains one
            text, stop = self._reader.read_text(self._detokenizer.flush()) + self._reader.read(token_id, ""), None
            self._detokenizer.count_hidden_token()
        else:
            text, stop = self._detokenizer.push(token_id)
            text = self._reader.read(token_id, text)
        if stop is not None:  # a stop string in the last token is a stop, not a length
            return text, _Ending(messages.FinishReason.STOP, stop)
        if finish_reason is EngineFinishReason.LENGTH:
            return text, _Ending(messages.FinishReason.LENGTH, held_text=self._detokenizer.flush())
        return text, None

    def _complete(self, last: engine_output.Output, now: float) -> None:
        assert self._ending is not None, self
        reason, stop_match, held = self._ending
        is_done = reason is messages.FinishReason.STOP and isinstance(stop_match, int)
        text = last.text + self._rest(held, cut_off=not is_done)
        if is_done and self._reader is not None and self._reader.has_calls:
            reason, stop_match = messages.FinishReason.TOOL_CALLS, None
        self._finish(codec.replace(last, text=text, finish_reason=reason, stop_match=stop_match), now)

    def _rest(self, held: str, *, cut_off: bool) -> str:
        """Returns the answer's held-back text. `cut_off`: the model had not finished."""
        if self._reader is None:
            return held
        return self._reader.read_text(held) + self._reader.finish(cut_off=cut_off)

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
        if self._reader is not None and self._reader.has_parts:
            reasoning, tool_calls = self._reader.take_parts()
            output = codec.replace(output, reasoning=reasoning, tool_calls=tool_calls)
        try:
            self._sink(output)
        except Exception as error:  # a bug in one sink ends its own stream, never its neighbours' step
            self._sink_failed = True
            self._report(f"the sink of {self.request.key} failed", error)

    def _usage(self) -> messages.Usage:
        prompt, completion = len(self.request.token_ids), self._detokenizer.num_tokens
        return messages.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            cached_tokens=0 if self._first_token is None else self._first_token.cached_tokens,
            reasoning_tokens=UNSET if self._reader is None else self._reader.reasoning_tokens,
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


def _ends_early(place: int, token_ids: Sequence[int]) -> errors.RequestError:
    problem = f"the completion ends with token {place + 1} of the {len(token_ids)} given ones"
    return errors.request_error(errors.Code.INVALID_REQUEST, problem, param="resume_from")


def _check_time(began_s: float, num_read: int, token_ids: Sequence[int]) -> None:
    """Raises RequestError if reading resumed tokens, which began at `began_s`, takes too long."""
    if time.monotonic() - began_s > _MAX_RESUME_S:
        problem = f"resume_from: its {len(token_ids)} tokens take too long to read, the first {num_read} alone did"
        raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="resume_from")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
