"""Completions: a wire request for each plain prompt, and the answers to all of them as one list of choices."""

import codecs
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai import other_names, schemas
from tokenbus.gateway.openai.choices import PLAIN, ChoicesEncoder, StreamForm, encode_prompt_logprobs, token_name
from tokenbus.gateway.openai.sampling_fields import SamplingFields
from tokenbus.gateway.serving.answer_events import (
    AnswerEnded,
    AnswerEvent,
    AnswerEventReader,
    PartGrew,
    PromptComputed,
    PromptScored,
    TokensCounted,
    TokensSampled,
)
from tokenbus.gateway.serving.dialect import ApiEndpoint, ParsedGeneration, RequestHead, ResponseHead, UnservedField
from tokenbus.protocol.wire import errors
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


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The log probabilities of an answer's tokens, or of part of them: every list has one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of an echoed prompt, which nothing precedes."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Characters of the text before each token."""

    def followed_by(self, more: "Logprobs") -> "Logprobs":
        """Returns these and those of the tokens that follow."""
        return Logprobs(
            tokens=self.tokens + more.tokens,
            token_logprobs=self.token_logprobs + more.token_logprobs,
            top_logprobs=self.top_logprobs + more.top_logprobs,
            text_offset=self.text_offset + more.text_offset,
        )


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or the next piece of one."""

    text: str
    index: int
    logprobs: Logprobs | None = None
    finish_reason: str | None
    prompt_logprobs: schemas.PromptLogprobs | UnsetType = UNSET
    """vLLM's, if requested, like those below. In a stream, those of the next tokens of the prompt."""
    token_ids: list[int] | UnsetType = UNSET
    """Those of the tokens since the last event, or of the whole answer."""
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """In the first event of an answer, or in a whole one."""


class Echo(NamedTuple):
    """The part of a response that repeats a prompt, before its answers."""

    text: str = ""
    has_tokens: bool = False
    """Whether the text is that of its tokens, which come with their log probabilities: the prompt was token ids."""
    logprobs: int | None = None
    """The number of likeliest tokens that are shown with each of its tokens; None: no log probabilities are."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response, or one event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    """Unix seconds."""
    model: str
    choices: list[CompletionChoice]
    usage: schemas.CompletionUsage | UnsetType | None = UNSET
    """In a stream only if requested: null, until the numbers follow in a separate event at the end."""
    prompt_progress: schemas.ReportedProgress | UnsetType = UNSET
    """In events about the prompt's progress, if requested."""


def read(asked: CompletionRequest, head: RequestHead) -> ParsedGeneration:
    """Validates a body as a router would. Raises RequestError with OpenAI's name for the field at fault."""
    prompts, n = _prompts_of(asked.prompt), asked.num_answers
    _check(asked, len(prompts), n)
    common = asked.to_wire(head.session)
    requests = [
        _to_wire(asked, prompt, common.fields, head.id if not number else f"{head.id}-p{number}")
        for number, prompt in enumerate(prompts)
    ]
    for number, request in enumerate(requests):
        place = "prompt" if len(requests) == 1 else f"prompt[{number}]"
        with http_errors.renaming(http_errors.by_field(common.names | {"prompt": place, "token_ids": place})):
            requests[number] = validation.check_request(request)
    echoes = [_echo(asked, one) for one in requests]
    own_names = {"token_ids": "prompt"} | ({} if asked.prompt_logprobs is not None else {"prompt_logprobs": "echo"})
    return ParsedGeneration(
        model=head.model,
        requests=requests,
        encoder=functools.partial(
            CompletionEncoder,
            n=n,
            echoes=echoes,
            form=asked.stream_form,
            prompt_logprobs=asked.prompt_logprobs,
            names_by_id=bool(asked.return_tokens_as_token_ids),
        ),
        stream=bool(asked.stream),
        n=n,
        counts_tokens=asked.stream_form.continuous_usage,
        shows_prompts=bool(asked.return_token_ids),
        name_of=http_errors.by_field(common.names | own_names),
    )


def _echo(asked: CompletionRequest, request: wire.GenerateRequest) -> Echo:
    if not asked.echo:
        return Echo()
    return Echo(request.prompt or "", has_tokens=request.prompt is None, logprobs=asked.logprobs)


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
        raise errors.unsupported_field("best_of", f"must equal n, which is {n}")
    if asked.return_token_ids and asked.suffix:
        raise errors.unsupported_field("return_token_ids", "the tokens of a prompt with a suffix are not known")


def _to_wire(
    asked: CompletionRequest, prompt: str | list[int], common: dict[str, Any], request_id: str
) -> wire.GenerateRequest:
    fields = dict(common)
    if fields["max_tokens"] is None:
        fields["max_tokens"] = DEFAULT_MAX_TOKENS
    if asked.echo and (asked.logprobs is not None or not isinstance(prompt, str)):
        # the tokens of a prompt of token ids have their texts there
        fields["prompt_logprobs"] = max(asked.prompt_logprobs or 0, asked.logprobs or 0)
    return wire.GenerateRequest(
        id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        token_ids=None if isinstance(prompt, str) else prompt,
        suffix=asked.suffix or None,
        logprobs=asked.logprobs,
        **fields,
    )


class CompletionEncoder(ChoicesEncoder):
    """Encodes answers as the choices of completions."""

    id_prefix = "cmpl-"
    event_type = response_type = Completion

    def __init__(
        self,
        head: ResponseHead,
        *,
        n: int,
        echoes: Sequence[Echo],
        form: StreamForm = PLAIN,
        prompt_logprobs: int | None = None,
        names_by_id: bool = False,
    ) -> None:
        """`echoes` has what to put before the answers to each prompt. `prompt_logprobs` is how many of the likeliest
        tokens are shown for each one of the prompt, if these are. `names_by_id`: log probabilities name tokens by their
        ids."""
        super().__init__(head, form=form)
        self._n = n
        self._echoes = echoes
        self._num_prompt_logprobs = prompt_logprobs
        self._names_by_id = names_by_id
        self._prompt_ids: Sequence[Sequence[int]] = ()
        """The token ids of the prompts, if these are shown."""
        self._offsets: dict[int, int] = {}
        """The number of characters in each answer's tokens so far."""
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        """The decoders of prompts whose tokens are echoed."""

    def show_prompts(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Takes the token ids of each prompt."""
        self._prompt_ids = token_ids

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns the events of one chunk of an answer."""
        text, logprobs, reason = "", None, None
        scored: schemas.PromptLogprobs | UnsetType = UNSET
        token_ids: list[int] = []
        progress: list[bytes] = []
        echo = self._echoes[choice // self._n]
        for event in events:
            match event:
                case PromptComputed() | TokensCounted():
                    self._note(choice, event)
                    if isinstance(event, PromptComputed):
                        progress = self._progress(CompletionChoice(text="", index=choice, finish_reason=None), event)
                case PromptScored():
                    if echo.has_tokens:
                        text += self._echoed_text(choice, event.logprobs)
                    if echo.logprobs is not None:
                        logprobs = self._logprobs(choice, event.logprobs, echo.logprobs)
                    if self._num_prompt_logprobs is not None:
                        scored = encode_prompt_logprobs(event.logprobs, self._num_prompt_logprobs)
                case TokensSampled():
                    token_ids = event.token_ids
                    if event.logprobs:
                        logprobs = self._logprobs(choice, event.logprobs)
                case PartGrew():
                    text += event.added
                case AnswerEnded():
                    reason = event.finish_reason
                    if event.usage is not None:
                        self._usages[choice] = event.usage
                case _:
                    pass
        if not (text or token_ids) and logprobs is None and reason is None and scored is UNSET:
            return progress
        prompt: Sequence[int] | UnsetType = UNSET
        if choice not in self._started:
            self._started.add(choice)
            text, prompt = echo.text + text, self._prompt(choice)
        made = CompletionChoice(
            text=text,
            index=choice,
            logprobs=logprobs,
            finish_reason=reason,
            prompt_logprobs=scored,
            token_ids=token_ids or UNSET,
            prompt_token_ids=prompt,
        )
        return [*progress, self._event([made])]

    def whole(self, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the JSON body of a whole response."""
        return self._response([self._whole_choice(number, one) for number, one in enumerate(answers)], answers)

    def _whole_choice(self, number: int, answer: AnswerEventReader) -> CompletionChoice:
        assert answer.end is not None, answer
        echo, prompt, asked = self._echoes[number // self._n], answer.prompt_logprobs, self._num_prompt_logprobs
        echoed = self._echoed_text(number, prompt) if echo.has_tokens else echo.text
        logprobs = None if echo.logprobs is None else self._logprobs(number, prompt, echo.logprobs)
        if answer.logprobs:
            sampled = self._logprobs(number, answer.logprobs)
            logprobs = sampled if logprobs is None else logprobs.followed_by(sampled)
        return CompletionChoice(
            text=echoed + "".join(part.text for part in answer.parts),
            index=number,
            logprobs=logprobs,
            finish_reason=answer.end.finish_reason,
            prompt_logprobs=UNSET if asked is None else encode_prompt_logprobs(prompt, asked),
            token_ids=answer.token_ids or UNSET,
            prompt_token_ids=self._prompt(number),
        )

    def _prompt(self, choice: int) -> Sequence[int] | UnsetType:
        return self._prompt_ids[choice // self._n] if self._prompt_ids else UNSET

    def _echoed_text(self, choice: int, tokens: Sequence[wire.PromptLogprob]) -> str:
        """Returns the text of the next tokens of a prompt, in whole characters."""
        decoder = self._decoders.setdefault(choice, _decoder(errors="replace"))
        return decoder.decode(b"".join([bytes(token.bytes) for token in tokens]))

    def _logprobs(
        self, choice: int, tokens: Sequence[wire.TokenLogprob | wire.PromptLogprob], num_top: int | None = None
    ) -> Logprobs:
        """Returns the log probabilities of the next tokens of a prompt, or of the answer to it."""
        made = _logprobs_of(tokens, self._offsets.get(choice, 0), num_top, by_id=self._names_by_id)
        self._offsets[choice] = self._offsets.get(choice, 0) + sum(len(token.text) for token in tokens)
        return made


ENDPOINT = ApiEndpoint(
    path="/v1/completions",
    summary="Completions of plain prompts",
    body=CompletionRequest,
    read=read,
    response=Completion,
    event=Completion,
    required=("prompt",),
    unserved=other_names.UNSERVED
    | {
        "add_special_tokens": UnservedField("use token ids", (None, True)),
        "prompt_embeds": UnservedField("prompts are texts or token ids"),
    },
    ignored=other_names.IGNORED | {"thinking_token_budget": "completions have no reasoning"},
)


_decoder = codecs.getincrementaldecoder("utf-8")


def _logprobs_of(
    tokens: Sequence[wire.TokenLogprob | wire.PromptLogprob], offset: int, num_top: int | None, *, by_id: bool
) -> Logprobs:
    """Returns the log probabilities of tokens, the first of which begins at `offset`, with at most `num_top` of the
    likeliest ones for each, named by their texts or ids."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return Logprobs(
        tokens=[token_name(token, by_id=by_id) for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=[
            None if token.logprob is None else _likeliest(token, token.logprob, num_top, by_id=by_id)
            for token in tokens
        ],
        text_offset=offsets,
    )


def _likeliest(
    token: wire.TokenLogprob | wire.PromptLogprob, logprob: float, num_top: int | None, *, by_id: bool
) -> dict[str, float]:
    """Returns the likeliest tokens and, as in OpenAI's API, the token itself if it is none of these.

    Several tokens may have the same text, such as one byte of a character each: then the likeliest counts."""
    named = {token_name(one, by_id=by_id): one.logprob for one in reversed(token.top[:num_top])}
    named.setdefault(token_name(token, by_id=by_id), logprob)
    return named
