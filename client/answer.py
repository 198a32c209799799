"""Everything that a request returns, without the fields by which a stream is put in order.

A value that may be absent is None, an absent list is empty."""

import msgspec

from tokenbus.client.wire.request_fields import ChatMessageFields
from tokenbus.protocol.wire import messages


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Tokens of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Every sampled token, including the one that ended the answer."""
    total_tokens: int = 0
    """The sum of both."""
    cached_tokens: int = 0
    """Prompt tokens that did not have to be computed."""
    reasoning_tokens: int | None = None
    """Completion tokens that belong to the reasoning; None if the answer was not parsed."""


class AnswerTimings(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Where the time of one request went, in ms, counted from when its worker accepted it."""

    queue_ms: float = 0.0
    """Until the first step."""
    prefill_ms: float = 0.0
    """From the first step to the first token."""
    ttft_ms: float = 0.0
    """Until the first token."""
    decode_ms: float = 0.0
    """From the first token to the end."""
    total_ms: float = 0.0
    """Until the end."""
    fetched_tokens: int | None = None
    """The part of `cached_tokens` that came from another worker."""
    fetch_ms: float | None = None
    """The part of `queue_ms` in which they were fetched."""


class CallDelta(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A tool call, or more of one."""

    index: int
    """The number of the call among those of the answer, from 0."""
    id: str | None = None
    """The call's id, in its first delta."""
    name: str | None = None
    """The function's name, in the first delta."""
    arguments: str = ""
    """More of the arguments' text."""


class AnswerChunk(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """More of an answer. The last chunk has a `finish_reason`, and only that one has `usage` and `timings`."""

    text: str = ""
    """New text, in whole characters; may be empty."""
    reasoning: str = ""
    """New text of the reasoning, which is not part of `text`."""
    tool_calls: list[CallDelta] = []
    tokens: int = 0
    """Sampled tokens of this chunk."""
    finish_reason: messages.FinishReason | None = None
    """`stop`, `length` or `tool_calls`; `cancelled` if you have cancelled the stream."""
    stop_match: str | int | None = None
    """The stop string or token id that ended the answer."""
    stopped_by: messages.StoppedBy | None = None
    """Who ended the answer early, if anyone: then it is incomplete, like one that has reached its `max_tokens`."""
    usage: TokenUsage | None = None
    timings: AnswerTimings | None = None
    token_ids: list[int] = []
    """Ids of the tokens, with `return_token_ids`."""
    logprobs: list[messages.TokenLogprob] = []
    """Log probabilities of the tokens, with `logprobs`."""
    prompt_logprobs: list[messages.PromptLogprob] = []
    """Log probabilities of the next tokens of the prompt, with `prompt_logprobs`."""
    progress: messages.Progress | None = None
    """Progress of the prompt's computation, with `return_progress`."""
    sampling: messages.SamplingReport | None = None
    """The parameters of sampling, in the first chunk and in the last one, with `return_sampling`."""
    load_progress: float | None = None
    """The share of the model that is loaded, 0 to 1, while a worker loads it."""
    id: str = ""
    """The request's id. It changes if the library has to continue a lost request."""
    model: str | None = None
    """The model, in the first chunk, in empty ones and in the last one."""
    worker_id: str | None = None
    """The worker, in the same chunks."""
    created: int | None = None
    """Unix time in seconds, in the same chunks."""
    hash_scheme: str | None = None
    """Names the vocabulary, in empty chunks; `resume_from` takes it together with the token ids."""
    routing: messages.RoutingReport | None = None
    """Why the worker was chosen, in the last chunk, with `routing={"explain": True}`."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of one of the request's tools."""

    id: str
    """The id that the tool's result must refer to."""
    name: str
    """The function's name."""
    arguments: str = ""
    """The text of a JSON object, if the call is complete."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A whole answer, or what has arrived of it."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    """All of them are complete if the finish reason is `tool_calls`; otherwise the last one may be cut off."""
    finish_reason: messages.FinishReason | None = None
    """Why it ended; None while it has not."""
    stopped_by: messages.StoppedBy | None = None
    """Who ended it early, if anyone: then it is incomplete, like one that has reached its `max_tokens`."""
    usage: TokenUsage | None = None
    timings: AnswerTimings | None = None
    model: str | None = None
    """The name under which the model is served."""
    token_ids: list[int] = []
    """Ids of all tokens, with `return_token_ids`."""
    logprobs: list[messages.TokenLogprob] = []
    """Log probabilities of all tokens, with `logprobs`."""
    prompt_logprobs: list[messages.PromptLogprob] = []
    """Log probabilities of the prompt's tokens, with `prompt_logprobs`."""
    sampling: messages.SamplingReport | None = None
    """The parameters of sampling, with `return_sampling`."""

    def to_message(self) -> ChatMessageFields:
        """Returns the answer as the assistant's turn in the conversation's next request."""
        message = ChatMessageFields(role="assistant", content=self.text)
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in self.tool_calls
            ]
        return message


class AnswerBuilder:
    """Puts an answer together from the chunks of the wire, each once and in order."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}
        """The id, name and arguments of each call, by its number."""
        self._token_ids: list[int] = []
        self._logprobs: list[messages.TokenLogprob] = []
        self._prompt_logprobs: list[messages.PromptLogprob] = []
        self._model: str | None = None
        self._terminal: messages.Chunk | None = None

    def __repr__(self) -> str:
        return f"<AnswerBuilder, {len(self._texts)} texts>"

    @property
    def text(self) -> str:
        self._texts = ["".join(self._texts)]  # so that to look after each chunk is cheap
        return self._texts[0]

    @property
    def finish_reason(self) -> messages.FinishReason | None:
        return self._terminal.finish_reason if self._terminal else None

    @property
    def usage(self) -> TokenUsage | None:
        return usage_of(self._terminal.usage or None) if self._terminal else None

    def add(self, chunk: messages.Chunk) -> None:
        """Adds the next chunk of the stream."""
        if chunk.text:
            self._texts.append(chunk.text)
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
        for delta in chunk.tool_calls or ():
            call = self._calls.setdefault(delta.index, (delta.id or "", delta.function.name or "", []))
            call[2].append(delta.function.arguments)
        self._token_ids += chunk.token_ids or ()
        self._logprobs += chunk.logprobs or ()
        self._prompt_logprobs += chunk.prompt_logprobs or ()
        self._model = chunk.model or self._model
        if chunk.finish_reason is not None:
            self._terminal = chunk

    def build(self, finish_reason: messages.FinishReason | None = None) -> Answer:
        """Returns the answer so far; `finish_reason` is that of an answer whose terminal will never be received."""
        end = self._terminal
        return Answer(
            text=self.text,
            reasoning="".join(self._reasoning),
            tool_calls=[
                ToolCall(id=id, name=name, arguments="".join(parts)) for id, name, parts in self._calls.values()
            ],
            finish_reason=end.finish_reason if end else finish_reason,
            stopped_by=end.stopped_by or None if end else None,
            usage=self.usage,
            timings=_timings_of(end.timings or None) if end else None,
            model=self._model,
            token_ids=[*self._token_ids],
            logprobs=[*self._logprobs],
            prompt_logprobs=[*self._prompt_logprobs],
            sampling=end.sampling or None if end else None,
        )


def chunk_of(chunk: messages.Chunk) -> AnswerChunk:
    """Returns the part of a chunk that concerns its reader."""
    return AnswerChunk(
        text=chunk.text,
        reasoning=chunk.reasoning or "",
        tool_calls=[
            CallDelta(
                index=one.index,
                id=one.id or None,
                name=one.function.name or None,
                arguments=one.function.arguments,
            )
            for one in chunk.tool_calls or ()
        ],
        tokens=chunk.tokens,
        finish_reason=chunk.finish_reason,
        stop_match=None if chunk.stop_match is msgspec.UNSET else chunk.stop_match,
        stopped_by=chunk.stopped_by or None,
        usage=usage_of(chunk.usage or None),
        timings=_timings_of(chunk.timings or None),
        token_ids=chunk.token_ids or [],
        logprobs=chunk.logprobs or [],
        prompt_logprobs=chunk.prompt_logprobs or [],
        progress=chunk.progress or None,
        sampling=chunk.sampling or None,
        load_progress=None if chunk.load_progress is msgspec.UNSET else chunk.load_progress,
        id=chunk.id,
        model=chunk.model or None,
        worker_id=chunk.worker_id or None,
        created=None if chunk.created is msgspec.UNSET else chunk.created,
        hash_scheme=chunk.hash_scheme or None,
        routing=chunk.routing or None,
    )


def usage_of(usage: messages.Usage | None) -> TokenUsage | None:
    """Returns the same counts without UNSET."""
    return None if usage is None else msgspec.convert(msgspec.to_builtins(usage), TokenUsage)


def _timings_of(timings: messages.Timings | None) -> AnswerTimings | None:
    return None if timings is None else msgspec.convert(msgspec.to_builtins(timings), AnswerTimings)
