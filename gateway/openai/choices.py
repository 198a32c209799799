"""The form that chat completions and completions share: numbered choices, streamed or whole, with one usage."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai import error_bodies, schemas
from tokenbus.gateway.serving.answer_events import (
    AnswerEvent,
    AnswerEventReader,
    PromptComputed,
    TokensCounted,
    total_usage,
)
from tokenbus.gateway.serving.dialect import ResponseHead, loading_comment
from tokenbus.protocol.wire import messages

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"
"""A comment, which event stream clients skip."""
AnyToken = messages.TokenLogprob | messages.PromptLogprob | messages.TokenAlternative
_encoder = msgspec.json.Encoder()


class StreamForm(NamedTuple):
    """Says what the events of a stream hold apart from choices."""

    include_usage: bool = False
    """An event before the end has the usage."""
    continuous_usage: bool = False
    """Every event has the usage so far, too."""
    shows_progress: bool = False
    """Events tell how much of the prompt is computed."""


PLAIN = StreamForm()


class ChoicesEncoder:
    """Encodes answers as choices; a subclass makes them from the answers' events."""

    id_prefix: ClassVar[str]
    event_type: ClassVar[type[Any]]
    response_type: ClassVar[type[Any]]

    def __init__(self, head: ResponseHead, *, form: StreamForm = PLAIN) -> None:
        self._id = self.id_prefix + head.request_id
        self._head = head
        self._form = form
        self._started: set[int] = set()
        self._usages: dict[int, messages.Usage] = {}
        self._prompts: dict[int, PromptComputed] = {}
        self._counts: dict[int, int] = {}
        """Sampled tokens so far, by choice; only if every event has the usage."""

    def end(self) -> list[bytes]:
        """Returns the usage, if requested, and `[DONE]`."""
        usage = encode_usage(total_usage(self._usages))
        return [self._event([], usage), DONE] if self._form.include_usage and usage else [DONE]

    def fail(self, error: ErrorResponse) -> list[bytes]:
        """Returns the error as an event, and `[DONE]`."""
        return [b"data: %b\n\n" % error_bodies.encode(error), DONE]

    def keep_alive(self, load_progress: float | None) -> bytes:
        """Returns a comment."""
        return loading_comment(load_progress) + KEEP_ALIVE

    def _note(self, choice: int, event: AnswerEvent) -> None:
        """Remembers what an event says about tokens."""
        if isinstance(event, PromptComputed):
            self._prompts[choice] = event
        elif isinstance(event, TokensCounted):
            self._counts[choice] = event.completion_tokens

    def _progress(self, empty: Any, prompt: PromptComputed) -> list[bytes]:
        """Returns an event, whose choice is empty, about a prompt's progress, if these are shown."""
        if not self._form.shows_progress:
            return []
        progress = schemas.ReportedProgress(
            total=prompt.prompt_tokens,
            cache=prompt.cached_tokens,
            processed=prompt.processed_tokens,
            time_ms=round(1e3 * self._head.age_s()),
        )
        return [b"data: %b\n\n" % self._encode(self.event_type, [empty], UNSET, prompt_progress=progress)]

    def _event(self, choices: list[Any], usage: schemas.CompletionUsage | None = None, **more: Any) -> bytes:
        if self._form.continuous_usage and choices:
            usage = self._usage_so_far(choices[0].index)
        shown = usage if self._form.include_usage else UNSET
        return b"data: %b\n\n" % self._encode(self.event_type, choices, shown, **more)

    def _usage_so_far(self, choice: int) -> schemas.CompletionUsage | None:
        prompt, count = self._prompts.get(choice), self._counts.get(choice, 0)
        if prompt is None:
            return None
        return encode_usage(
            messages.Usage(
                prompt_tokens=prompt.prompt_tokens,
                completion_tokens=count,
                total_tokens=prompt.prompt_tokens + count,
                cached_tokens=prompt.cached_tokens,
            )
        )

    def _response(self, choices: list[Any], answers: Sequence[AnswerEventReader], **more: Any) -> bytes:
        usages = {number: one.end.usage for number, one in enumerate(answers) if one.end and one.end.usage}
        return self._encode(self.response_type, choices, encode_usage(total_usage(usages)), **more)

    def _encode(
        self, form: type[Any], choices: list[Any], usage: schemas.CompletionUsage | UnsetType | None, **more: Any
    ) -> bytes:
        head = self._head
        return _encoder.encode(
            form(id=self._id, created=head.created, model=head.model, choices=choices, usage=usage, **more)
        )


def encode_usage(usage: messages.Usage | None) -> schemas.CompletionUsage | None:
    """Returns token counts in OpenAI's form, with zeros rather than gaps."""
    if usage is None:
        return None
    return schemas.CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=schemas.PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=schemas.CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens or 0),
    )


def token_name(token: AnyToken, *, by_id: bool = False) -> str:
    """Returns the text of a token, or its id in vLLM's form."""
    return f"token_id:{token.id}" if by_id else token.text


def encode_logprobs(
    tokens: Sequence[messages.TokenLogprob], *, by_id: bool = False
) -> list[schemas.ChatCompletionTokenLogprob]:
    """Returns the log probabilities of tokens, which are named by their texts or ids."""
    return [
        schemas.ChatCompletionTokenLogprob(
            token=token_name(token, by_id=by_id),
            logprob=token.logprob,
            bytes=token.bytes,
            top_logprobs=[
                schemas.TopLogprob(token=token_name(one, by_id=by_id), logprob=one.logprob, bytes=one.bytes)
                for one in token.top
            ],
        )
        for token in tokens
    ]


def encode_prompt_logprobs(tokens: Sequence[messages.PromptLogprob], num_top: int) -> schemas.PromptLogprobs:
    """Returns the log probabilities of a prompt in vLLM's form, with the likeliest `num_top` tokens of each."""
    encoded: schemas.PromptLogprobs = []
    for token in tokens:
        if token.logprob is None or token.rank is None:
            encoded.append(None)
            continue
        own = schemas.PromptTokenLogprob(logprob=token.logprob, rank=token.rank, decoded_token=token.text)
        likeliest = {
            str(one.id): schemas.PromptTokenLogprob(logprob=one.logprob, rank=rank, decoded_token=one.text)
            for rank, one in enumerate(token.top[:num_top], start=1)
        }
        encoded.append({str(token.id): own} | likeliest)
    return encoded
