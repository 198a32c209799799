"""Makes the request that continues a lost stream.

nothing has arrived                    the same request again
all received tokens' ids are known      the same request, with `resume_from`
otherwise, or after too many attempts  none: the stream ends with the error
"""

from array import array

from msgspec import UNSET

from tokenbus.protocol.wire import codec, errors, messages

MAX_RESUBMITS = 3
"""The number of times in a row that a request is resubmitted without a new token."""
_FINAL = (errors.Code.DEADLINE_EXCEEDED, errors.Code.REQUEST_CRASHES_ENGINE)
"""Errors of a continued stream that are more informative than the loss before them."""


class Continuation:
    """Remembers a stream's request and the tokens received, at 4 bytes each.

    Unless `resume` is False, a streaming request also asks for token ids. With `stream: false` no token arrives before
    the end, so the request can always be submitted again."""

    def __init__(self, request: messages.GenerateRequest, now: float, *, resume: bool) -> None:
        self._hides_ids = not request.return_token_ids
        if resume and request.is_streamed:
            request = codec.replace(request, return_token_ids=True)
        self.request = request
        """The first request to send."""
        self.num_resubmits = 0
        self._num_in_vain = 0
        """The number of resubmits since the last new token."""
        self._submitted_at = now
        self._resume = resume
        given = request.resume_from
        self._given_ids = given.token_ids if given else []
        self._hash_scheme = given.hash_scheme if given else None
        self._token_ids = array("I")
        self._num_tokens = 0
        self._loss: errors.Error | None = None
        """The loss that made it necessary to continue the stream; None once it has a new token."""
        self._refusal: errors.Error | None = None
        """Why the last attempt to continue it was refused."""

    def __repr__(self) -> str:
        return f"<Continuation, {self._num_tokens} tokens, {self.num_resubmits} resubmits>"

    @property
    def is_empty(self) -> bool:
        """True until a token has arrived: after that, restarting from the beginning could contradict it."""
        return not self._num_tokens

    @property
    def is_pending(self) -> bool:
        """True from a continuing resubmit until the next new token."""
        return self._loss is not None

    def take(self, chunk: messages.Chunk) -> messages.Chunk:
        """Records the tokens of the stream's next chunk, and returns the chunk as the user requested it."""
        # the token ids belong to the first worker's scheme
        self._hash_scheme = self._hash_scheme or chunk.hash_scheme or None
        if chunk.tokens:
            self._num_tokens += chunk.tokens
            self._num_in_vain, self._loss, self._refusal = 0, None, None
            if self._resume:
                self._keep(chunk.token_ids or [])
        return codec.replace(chunk, token_ids=UNSET) if chunk.token_ids and self._hides_ids else chunk

    def request_after(self, loss: errors.Error, now: float) -> messages.GenerateRequest | errors.Error:
        """Returns the request to submit next, without a new id, or the error with which the stream ends."""
        if self._num_in_vain >= MAX_RESUBMITS:
            return self._original_loss() or loss
        if not self.is_empty and not self._can_resume():
            return loss
        again = self.in_time(self.request, now)
        if isinstance(again, errors.Error):
            return again
        self.num_resubmits += 1
        self._num_in_vain += 1
        if self.is_empty:
            return again
        self._loss = self._loss or loss
        resume_from = messages.ResumeFrom(token_ids=[*self._given_ids, *self._token_ids], hash_scheme=self._hash_scheme)
        return codec.replace(again, resume_from=resume_from)

    def in_time(self, request: messages.GenerateRequest, now: float) -> messages.GenerateRequest | errors.Error:
        """Returns a request with the stream's remaining time, or the error if none is left."""
        if self.request.timeout_ms is None:
            return request
        remaining_ms = self.request.timeout_ms - (now - self._submitted_at) * 1e3
        if remaining_ms <= 0:
            return errors.make_error(errors.Code.DEADLINE_EXCEEDED)
        return codec.replace(request, timeout_ms=remaining_ms)

    def error_after_refusal(self, refusal: errors.Error) -> errors.Error | None:
        """Returns the error that ends the stream after a refused continuation; None if it may be retried."""
        assert self.is_pending, self
        if refusal.code in _FINAL:
            return refusal
        self._refusal = refusal
        return None if refusal.retryable else self._original_loss()

    def _keep(self, token_ids: list[int]) -> None:
        try:
            self._token_ids.extend(token_ids)
        except OverflowError:  # not a valid token id
            self._resume = False

    def _can_resume(self) -> bool:
        # without the scheme, a worker with another vocabulary could misread the ids
        return self._resume and self._hash_scheme is not None and len(self._token_ids) == self._num_tokens

    def _original_loss(self) -> errors.Error | None:
        """Returns the loss after which the stream could not be continued, with the reason if known."""
        if self._loss is None or self._refusal is None:
            return self._loss
        problem = f"{self._loss.message}; no other worker continues it: {self._refusal.message}"
        return errors.make_error(errors.Code.WORKER_LOST, problem)
