"""The engine client's side of one accepted request: turns sampled tokens into outputs and exactly one terminal.

It outlives an engine: when one dies, the next is given the prompt and the tokens sampled so far, and continues."""

import asyncio
from array import array
from collections.abc import Sequence

from tokenbus.protocol.wire import errors, messages
from tokenbus.worker import contract
from tokenbus.worker.engine.process.ipc import SequenceOutput
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason
from tokenbus.worker.engine_client.detokenizer import Detokenizer

_FAILURES = {
    EngineFinishReason.INSUFFICIENT_MEMORY: errors.make_error(errors.Code.INSUFFICIENT_MEMORY),
    EngineFinishReason.BAD_LOGITS: errors.make_error(
        errors.Code.INTERNAL, "the model computed logits that are not numbers"
    ),
    EngineFinishReason.ABORTED: errors.make_error(errors.Code.INTERNAL, "the engine aborted the request"),
    EngineFinishReason.FAILED: errors.make_error(errors.Code.INTERNAL, "the engine could not start the request"),
}


class Generation:
    """Turns tokens into outputs for `sink`. Times are seconds of one monotonic clock."""

    def __init__(
        self, request: contract.EngineRequest, sink: contract.Sink, token_bytes: Sequence[bytes], accepted_at: float
    ) -> None:
        self.request = request
        self._sink = sink
        self._detokenizer = Detokenizer(token_bytes, request.stop, request.sampling.min_tokens)
        self.accepted_at = accepted_at
        self.started_at: float | None = None
        self._first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_by: EngineFinishReason | None = None
        self.sampled = array("I")
        """The tokens that another engine needs after the prompt to continue."""
        self.crashes = 0
        """Engines that died in a step with this request since its last token."""
        self.has_ended = False
        """Its sink has been given the terminal."""
        self._sink_failed = False
        self._cached_tokens = 0
        self._processed_tokens = -1

    def __repr__(self) -> str:
        return f"<Generation {self.request.key}: {self._detokenizer.num_tokens} tokens>"

    @property
    def is_complete(self) -> bool:
        """Whether it ran to its end: to a stop, or to its full length."""
        return self.finished_by in (EngineFinishReason.STOP_TOKEN, EngineFinishReason.LENGTH)

    def begin(self, now: float) -> None:
        """An engine has started to compute it; the first start counts as the end of its queue time."""
        if self.started_at is None:
            self.started_at = now

    def progress(self, processed_tokens: int, cached_tokens: int) -> bool:
        """Hands out how far the prompt is computed, if that has changed; returns whether the sink failed."""
        # steps may report the same progress again, which is no news
        if processed_tokens == self._processed_tokens:
            return False
        self._processed_tokens = processed_tokens
        seen = messages.Progress(
            prompt_tokens=len(self.request.token_ids), processed_tokens=processed_tokens, cached_tokens=cached_tokens
        )
        self._hand_out(contract.Output(token_ids=[], text="", progress=seen))
        return self._sink_failed

    def advance(self, output: SequenceOutput, now: float) -> bool:
        """Takes a step's output; returns whether the generation has ended, possibly before the engine knows."""
        token_id, end = output.token_id, output.finish_reason
        logprobs = [] if output.logprob is None else [output.logprob]
        if output.cached_tokens is not None:
            self._cached_tokens = output.cached_tokens
        if token_id is None:
            assert end is not None
            self._finish(now, error=_FAILURES[end])
            return True
        self.sampled.append(token_id)
        # it survived a step, so earlier crashes were not its fault
        self.crashes = 0
        if self._first_token_at is None:
            self._first_token_at = now
        self.last_token_at = now
        text, stop_match = self._add_text(token_id, end)
        if stop_match is not None:
            self.finished_by, reason = EngineFinishReason.STOP_TOKEN, messages.FinishReason.STOP
        elif end is EngineFinishReason.LENGTH:
            self.finished_by, reason = end, messages.FinishReason.LENGTH
        else:
            self._hand_out(contract.Output(token_ids=[token_id], text=text, logprobs=logprobs))
            return self.has_ended or self._sink_failed  # its sink may have cancelled it
        self._finish(now, token_ids=[token_id], text=text, reason=reason, stop_match=stop_match, logprobs=logprobs)
        return True

    def cancel(self, now: float) -> None:
        self._finish(now, text=self._detokenizer.flush(), reason=messages.FinishReason.CANCELLED)

    def fail(self, code: errors.Code, now: float) -> None:
        """Ends it with an error because its engine is gone."""
        self._finish(now, error=errors.make_error(code))

    def _add_text(self, token_id: int, end: EngineFinishReason | None) -> tuple[str, str | int | None]:
        """Returns the text that may be published now, and the stop token or stop string that ends the completion."""
        if end is EngineFinishReason.STOP_TOKEN:
            self._detokenizer.count_hidden_token()
            return self._detokenizer.flush(), token_id
        text, stop = self._detokenizer.push(token_id)
        if stop is None and end is EngineFinishReason.LENGTH:  # a stop string in the last token is a stop, not a length
            text += self._detokenizer.flush()
        return text, stop

    def _finish(
        self,
        now: float,
        *,
        token_ids: list[int] | None = None,
        text: str = "",
        reason: messages.FinishReason = messages.FinishReason.ERROR,
        stop_match: str | int | None = None,
        error: errors.Error | None = None,
        logprobs: list[contract.Logprob] | None = None,
    ) -> None:
        assert not self.has_ended, self
        self.has_ended = True
        self._hand_out(
            contract.Output(
                token_ids=token_ids or [],
                text=text,
                finish_reason=reason,
                stop_match=stop_match,
                error=error,
                usage=self._usage(),
                timings=self._timings(now),
                logprobs=logprobs or [],
            )
        )

    def _hand_out(self, output: contract.Output) -> None:
        try:
            self._sink(output)
        except Exception as error:  # a bug in one sink ends its own stream, and never the step of its neighbours
            self._sink_failed = True
            context = {"message": f"the sink of {self.request.key} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _usage(self) -> messages.Usage:
        prompt, completion = len(self.request.token_ids), self._detokenizer.num_tokens
        return messages.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            cached_tokens=self._cached_tokens,
        )

    def _timings(self, now: float) -> messages.Timings:
        started = now if self.started_at is None else self.started_at
        first = now if self._first_token_at is None else self._first_token_at
        return messages.Timings(
            queue_ms=_ms(started - self.accepted_at),
            prefill_ms=_ms(first - started),
            ttft_ms=_ms(first - self.accepted_at),
            decode_ms=_ms(now - first),
            total_ms=_ms(now - self.accepted_at),
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
