"""Parses the body of a completion request and turns it into wire requests, one for each prompt."""

from collections.abc import Mapping, Sequence

import msgspec

from tokenbus.gateway.generation import conversation
from tokenbus.gateway.generation.answer_events import AnswerEventReader
from tokenbus.gateway.generation.dialect import ResponseHead
from tokenbus.gateway.generation.model_names import checked_model
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai.completions import response
from tokenbus.gateway.openai.sampling_fields import SamplingFields
from tokenbus.protocol.wire import codec, errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import validation

DEFAULT_MAX_TOKENS = 16
MAX_ANSWERS = 512
"""The most answers to all prompts of one request."""


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of a completion request. Unknown fields are ignored, as OpenAI's clients expect."""

    prompt: str | list[str | int | list[int]] | None = None
    """A text, texts, token ids, or lists of token ids."""
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


_decoder = codec.Decoder(CompletionRequest)


class ParsedCompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request for completions."""

    model: str
    requests: list[wire.GenerateRequest]
    stream: bool
    n: int
    include_usage: bool
    echo: bool

    @property
    def form(self) -> response.Form:
        """The form of its answers."""
        echoed = [one.prompt or "" if self.echo else "" for one in self.requests]
        return response.Form(n=self.n, echoed=echoed, include_usage=self.include_usage)

    def encoder(self, head: ResponseHead) -> response.CompletionEncoder:
        """Returns the encoder of a streamed response."""
        return response.CompletionEncoder(head, self.form)

    def encode_whole(self, head: ResponseHead, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the body of an unstreamed response."""
        return response.encode_whole(head, self.form, answers)

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns a router's or worker's error with OpenAI's name for the field at fault."""
        return http_errors.renamed(error, http_errors.by_field({"token_ids": "prompt"}))


def parse(body: bytes, headers: Mapping[str, str], request_id: str, default_model: str = "") -> ParsedCompletionRequest:
    """Parses a body, and validates it as a router would. Raises RequestError with OpenAI's name for the field at
    fault."""
    asked = _decoder.decode(body, codec.Encoding.JSON)
    model, prompts = checked_model(asked.model, default_model), _prompts_of(asked.prompt)
    n = 1 if asked.n is None else asked.n
    _check(asked, len(prompts), n)
    session = conversation.session_of(headers)
    requests = [
        _to_wire(asked, prompt, session, request_id if not number else f"{request_id}-p{number}")
        for number, prompt in enumerate(prompts)
    ]
    for number, request in enumerate(requests):
        place = "prompt" if len(requests) == 1 else f"prompt[{number}]"
        with http_errors.renaming(http_errors.by_field(asked.renamed | {"prompt": place, "token_ids": place})):
            validation.check_request(request)
    return ParsedCompletionRequest(
        model=model,
        requests=requests,
        stream=bool(asked.stream),
        n=n,
        include_usage=asked.includes_usage,
        echo=bool(asked.echo),
    )


def _prompts_of(given: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    """Returns the prompts. Raises RequestError if there are none, or they are of mixed kinds."""
    if given is None:
        raise errors.invalid_field("prompt", "is required")
    if isinstance(given, str):
        return [given]
    if not given:
        raise errors.invalid_field("prompt", "must not be empty")
    token_ids = [one for one in given if isinstance(one, int)]
    if len(token_ids) == len(given):
        return [token_ids]
    texts: list[str | list[int]] = [one for one in given if isinstance(one, str)]
    lists: list[str | list[int]] = [one for one in given if isinstance(one, list)]
    for found in (texts, lists):
        if len(found) == len(given):
            return found
    raise errors.invalid_field("prompt", "must be a text, texts, token ids, or lists of token ids")


def _check(asked: CompletionRequest, num_prompts: int, n: int) -> None:
    """Checks fields without a counterpart on the wire."""
    asked.check_answers()
    if num_prompts * n > MAX_ANSWERS:
        raise errors.invalid_field("prompt", f"at most {MAX_ANSWERS} answers are allowed, got {num_prompts} times {n}")
    if asked.best_of not in (None, n):
        problem = f"best_of: must equal n, which is {n}"
        raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="best_of")
    if asked.echo and not isinstance(asked.prompt, str) and not all(isinstance(one, str) for one in asked.prompt or ()):
        raise errors.request_error(errors.Code.UNSUPPORTED, "echo: only text prompts are supported", param="echo")
    if asked.echo and asked.logprobs is not None:
        problem = "echo: the log probabilities of a prompt are not computed"
        raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="echo")


def _to_wire(
    asked: CompletionRequest, prompt: str | list[int], session: str | None, request_id: str
) -> wire.GenerateRequest:
    common = asked.to_wire(session)
    if asked.max_tokens is None:
        common["max_tokens"] = DEFAULT_MAX_TOKENS
    return wire.GenerateRequest(
        id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        token_ids=None if isinstance(prompt, str) else prompt,
        suffix=asked.suffix or None,
        logprobs=asked.logprobs,
        **common,
    )
