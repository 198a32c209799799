"""The fields common to chat completions and completions, which the Responses API knows and does not serve."""

from typing import Any

import msgspec

from tokenbus.gateway.openai import other_names
from tokenbus.gateway.openai.choices import StreamForm
from tokenbus.gateway.openai.fields import WireFields
from tokenbus.gateway.openai.other_names import OtherNames
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire import messages as wire

MAX_CHOICES = 128
"""OpenAI's limit on `n`."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    """Adds an event with the usage before the end."""
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, every event has the usage so far."""


class FormatWithSchema(wire.ResponseFormat, frozen=True, kw_only=True):
    """OpenAI's `response_format`, to which other servers have added other places for the schema."""

    schema: dict[str, Any] | None = None
    """llama-server's and Together's, with any type but `text`."""
    value: dict[str, Any] | None = None
    """Text Generation Inference's; huggingface_hub moves every schema there."""

    @property
    def other_place(self) -> str:
        """Where the schema is, if it is not where OpenAI has it."""
        return next((name for name in ("schema", "value") if getattr(self, name) is not None), "")

    def to_wire(self) -> wire.ResponseFormat:
        """Raises RequestError for a schema that is given twice, or that the type does not allow."""
        place = self.other_place
        if not place:
            return wire.ResponseFormat(type=self.type, json_schema=self.json_schema)
        if self.type == "text" or self.json_schema is not None:
            raise errors.invalid_field(f"response_format.{place}", "can't be combined with type: text or json_schema")
        if self.schema is not None and self.value is not None:
            raise errors.invalid_field("response_format.value", "is another name of schema: give one of them")
        return wire.ResponseFormat(type="json_schema", json_schema=wire.JsonSchema(schema=getattr(self, place)))


class SamplingFields(OtherNames, frozen=True, kw_only=True):
    """The fields common to chat completions and completions."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    response_format: FormatWithSchema | None = None
    return_token_ids: bool | None = None
    """vLLM's: the response has the ids of the tokens of the prompt and of the answer."""
    return_tokens_as_token_ids: bool | None = None
    """vLLM's: log probabilities name tokens by their ids, as `token_id:5`."""
    return_progress: bool | None = None
    """llama-server's: events tell how much of the prompt is computed."""

    def check_answers(self) -> None:
        """Checks fields without a counterpart on the wire. Raises RequestError."""
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise errors.invalid_field("n", f"must be 1 to {MAX_CHOICES}, got {self.n}")
        if self.stream_options is not None and not self.stream:
            raise errors.invalid_field("stream_options", "needs stream: true")

    @property
    def num_answers(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stream_form(self) -> StreamForm:
        """The content of a stream's events apart from choices."""
        options = self.stream_options or StreamOptions()
        return StreamForm(
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            shows_progress=bool(self.stream and self.return_progress),
        )

    def to_wire(self, session: str | None) -> WireFields:
        common, others, form = super().to_wire(session), other_names.translated(self), self.stream_form
        own = {
            "max_tokens": self.max_tokens,
            "response_format": self.response_format and self.response_format.to_wire(),
            "cache_prompt": self.cache_prompt,
            "prompt_logprobs": self.prompt_logprobs,
            "return_token_ids": self.return_token_ids or None,
            "return_progress": form.shows_progress or form.continuous_usage or None,
        }
        names = common.names | others.names
        if self.response_format is not None and (place := self.response_format.other_place):
            names = names | {"response_format.json_schema.schema": f"response_format.{place}"}
        return WireFields(common.fields | own | others.fields, names)
