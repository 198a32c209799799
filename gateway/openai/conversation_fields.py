"""The fields common to chat completions and responses, of OpenAI and of other servers."""

from typing import Any

import msgspec

from tokenbus.gateway.openai import fields, other_names
from tokenbus.gateway.openai.fields import ReasoningWishes, RequestedReasoning
from tokenbus.gateway.openai.other_names import ThinkingSwitch
from tokenbus.gateway.openai.sampling_fields import SamplingFields
from tokenbus.gateway.serving.dialect import UnservedField
from tokenbus.protocol.wire import errors

_SWITCHES = {"enabled": True, "disabled": False}


class ConversationFields(SamplingFields, frozen=True, kw_only=True):
    """The fields of endpoints that take a conversation."""

    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: RequestedReasoning | None = None
    """OpenRouter's in chat completions."""
    thinking_token_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    thinking_budget_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not OpenAI's; has the same meaning as on the wire."""
    enable_thinking: bool | None = None
    """Qwen's: the variable of this name of the chat template."""
    thinking: ThinkingSwitch | None = None
    """DeepSeek's and Z.ai's form of the same."""

    def read_wishes(self) -> ReasoningWishes:
        """Returns how long a model should reason, with the variables for its chat template. Raises RequestError for an
        unknown switch and an invalid budget."""
        kind, switch = self.thinking.type if self.thinking else None, self.enable_thinking
        if kind is not None and kind != "auto":
            if kind not in _SWITCHES:
                raise errors.invalid_field(
                    "thinking.type", f"must be {', '.join(_SWITCHES)} or auto, got {kind[:40]!r}"
                )
            switch = _SWITCHES[kind]
        given = {"enable_thinking": switch, "clear_thinking": self.thinking and self.thinking.clear_thinking}
        variables = {name: value for name, value in given.items() if value is not None}
        if variables or self.chat_template_kwargs is not None:
            variables |= self.chat_template_kwargs or {}
        asked, budget = self.reasoning or RequestedReasoning(), self.thinking and self.thinking.budget_tokens
        names = {}
        if budget is not None and asked.max_tokens is None:
            asked = msgspec.structs.replace(asked, max_tokens=budget)
            names = {"reasoning.max_tokens": "thinking.budget_tokens"}
        found = fields.read_wishes(self, asked, variables or self.chat_template_kwargs, self.reasoning_effort)
        return found._replace(names=names | found.names)

    def parallel_calls(self, choice: str | dict[str, Any] | None) -> bool | None:
        """Returns the wire's `parallel_tool_calls`: a function that the choice names is called once, as by OpenAI,
        unless the body says otherwise."""
        return False if self.parallel_tool_calls is None and isinstance(choice, dict) else self.parallel_tool_calls


UNSERVED = other_names.UNSERVED | {
    "functions": UnservedField("use tools", (None, [])),
    "function_call": UnservedField("use tool_choice", (None, "auto", "none")),
    "modalities": UnservedField("only text is served", (None, [], ["text"])),
    "audio": UnservedField("only text is served"),
    "web_search_options": UnservedField("the model has no access to the web"),
    "add_special_tokens": UnservedField("the chat template writes them", (None, False)),
    "chat_template": UnservedField("only the model's own is served"),
    "documents": UnservedField("give them to the template: chat_template_kwargs", (None, [])),
    "echo": UnservedField("answers don't repeat the conversation", (None, False)),
    "include_reasoning": UnservedField("reasoning is always part of the response", (None, True)),
    "reasoning_format": UnservedField(
        "reasoning is told apart from the answer", (None, "auto", "deepseek", "deepseek-legacy", "parsed")
    ),
    "separate_reasoning": UnservedField("reasoning is told apart from the answer", (None, True)),
    "stream_reasoning": UnservedField("reasoning is streamed like the answer", (None, True)),
    "parse_tool_calls": UnservedField("calls are told apart from the answer", (None, True)),
    "mm_processor_kwargs": UnservedField("only text is served", (None, {})),
    "media_io_kwargs": UnservedField("only text is served", (None, {})),
    "safe_prompt": UnservedField("write a system message", (None, False)),
    "prompt_mode": UnservedField("use reasoning_effort"),
    "tool_prompt": UnservedField("write a system message"),
    "guardrails": UnservedField("there are none", (None, [])),
    "return_prompt_text": UnservedField("prompts are not returned", (None, False)),
    "reasoning.exclude": UnservedField("reasoning is always part of the response", (None, False)),
}
IGNORED = other_names.IGNORED | {
    "prediction": "what a server guesses ahead with changes no answer",
    "verbosity": "a hint that open models don't know",
    "moderation": "a hint that open models don't know",
    "provider": "a hint of where another server runs the request",
    "reasoning.context": "a hint that open models don't know",
    "reasoning.mode": "a hint that open models don't know",
}
"""Fields that change no answer, with the reason."""
