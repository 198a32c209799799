"""The fields common to chat completions and completions, which the Responses API knows and does not serve."""

from typing import Any, Literal

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


class GivenFormat(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's `response_format`, to which other servers have added other places for the schema, and regexes."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    """The last two are Text Generation Inference's, with a `value`."""
    json_schema: wire.JsonSchema | None = None
    schema: dict[str, Any] | None = None
    """llama-server's and Together's, with any type for JSON."""
    value: dict[str, Any] | str | None = None
    """Text Generation Inference's, with any type but `text`: a regex, or a schema or the text of one, which may be in
    an object with its name; huggingface_hub moves every schema there."""

    @property
    def other_place(self) -> str:
        """Where the schema is, if it is not where OpenAI has it."""
        if self.schema is not None:
            return "schema"
        if self.value is None or self.type == "regex":
            return ""
        return "value.schema" if self._has_named_schema else "value"

    @property
    def _has_named_schema(self) -> bool:
        named = self.value if self.type == "json_schema" and isinstance(self.value, dict) else {}
        return isinstance(named.get("schema"), dict) and named.keys() <= {"name", "schema"}

    def regex(self) -> str | None:
        """Returns the regex, if this is one. Raises RequestError if it is none, or if there is a schema too."""
        if self.type != "regex":
            return None
        if self.schema is not None or self.json_schema is not None:
            place = "schema" if self.schema is not None else "json_schema"
            raise errors.invalid_field(f"response_format.{place}", "can't be combined with type: regex")
        if not isinstance(self.value, str) or not self.value:
            raise errors.invalid_field("response_format.value", "must be a regex that is not empty, with type: regex")
        return self.value

    def to_wire(self) -> wire.ResponseFormat | None:
        """Returns None for a regex, which is a field of its own. Raises RequestError for a schema that is given twice
        or is missing, or that the type does not allow."""
        if self.type == "regex":
            return None
        place = self.other_place
        if not place:
            if self.type == "json":
                raise errors.invalid_field("response_format.value", "must be a JSON schema with type: json")
            return wire.ResponseFormat(type=self.type, json_schema=self.json_schema)
        if self.type == "text" or self.json_schema is not None:
            raise errors.invalid_field(f"response_format.{place}", "can't be combined with type: text or json_schema")
        if self.schema is not None and self.value is not None:
            raise errors.invalid_field("response_format.value", "is another name of schema: give one of them")
        given = self.schema if self.value is None else self.value
        if self._has_named_schema and isinstance(given, dict):
            given = given["schema"]
        return other_names.json_format(f"response_format.{place}", given)


class SamplingFields(OtherNames, frozen=True, kw_only=True):
    """The fields common to chat completions and completions."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    response_format: GivenFormat | None = None
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
        own: dict[str, Any] = {
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
        if self.response_format is not None and (regex := self.response_format.regex()) is not None:
            if self.regex is not None or "regex" in others.fields:
                raise errors.invalid_field("response_format.value", "is another name of regex: give one of them")
            own |= {"regex": regex}
            names = names | {"regex": "response_format.value"}
        return WireFields(common.fields | own | others.fields, names)
