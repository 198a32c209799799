"""The stream validator raises when an engine's outputs break the engine contract.

It is on in tests, and in production with TOKENBUS_DEBUG=1."""

from tokenbus.protocol.wire import messages
from tokenbus.worker.contract import engine_output, engine_request

_REASONS_WITH_TOKENS = (messages.FinishReason.STOP, messages.FinishReason.LENGTH)


class ContractError(AssertionError):
    """An engine broke a rule of `worker/contract/contract.py`."""


class StreamValidator:
    """A sink that checks every output of a request before passing it on."""

    def __init__(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> None:
        self._request = request
        self._sink = sink
        self._num_tokens = 0
        self._terminal: engine_output.Output | None = None

    def __repr__(self) -> str:
        return f"<StreamValidator of {self._request.key}: {self._num_tokens} tokens>"

    def __call__(self, output: engine_output.Output) -> None:
        """Raises ContractError."""
        self._require(self._terminal is None, "an output after the terminal")
        self._check_resumed(output)
        self._num_tokens += len(output.token_ids)
        self._require(self._num_tokens <= self._request.sampling.max_tokens, "more tokens than max_tokens")
        if output.finish_reason is None:
            self._require(output.usage is None and output.error is None, "only a terminal has usage or error")
        else:
            self._check_terminal(output)
            self._terminal = output
        self._sink(output)

    def _check_resumed(self, output: engine_output.Output) -> None:
        resumed, count = self._request.resumed, self._num_tokens
        given = list(resumed.token_ids) if resumed is not None else []
        self._require(output.is_resumed == (count < len(given)), "the given tokens are resumed, before all others")
        if output.resumed_texts is not None:
            self._require(output.token_ids == given, "a resumed output has other tokens than the given ones")
            self._require(len(output.resumed_texts) == len(given), "a resumed output has not one text for each token")
            self._require(output.text == "".join(output.resumed_texts), "a resumed output's texts are not its text")
        if output.first_token is not None:
            is_first = not count and bool(output.token_ids) and not output.is_resumed
            self._require(is_first, "first_token without the first token")

    def _check_terminal(self, output: engine_output.Output) -> None:
        reason, sampling = output.finish_reason, self._request.sampling
        usage = output.usage
        if usage is None:
            raise ContractError(f"{self!r}: a terminal without usage")
        self._require(usage.completion_tokens == self._num_tokens, "completion_tokens is not the number of tokens")
        self._require(usage.prompt_tokens == len(self._request.token_ids), "prompt_tokens is not the prompt's length")
        self._require(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "usage does not add up")
        self._require(
            (reason is messages.FinishReason.ERROR) == (output.error is not None), "error and reason disagree"
        )
        self._require(
            reason is not messages.FinishReason.LENGTH
            or self._num_tokens == (0 if self._request.is_warm_up else sampling.max_tokens),
            "length with fewer than max_tokens",
        )
        self._require(
            (reason is messages.FinishReason.STOP) == (output.stop_match is not None), "stop and stop_match disagree"
        )
        if reason is messages.FinishReason.STOP and self._request.constraint is None:
            self._require(self._num_tokens > sampling.min_tokens, "stop within min_tokens")
        if reason in _REASONS_WITH_TOKENS:
            self._require(output.timings is not None, "a terminal without timings")

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            raise ContractError(f"{self!r}: {rule}")
