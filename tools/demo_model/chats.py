"""The demo model's special tokens and chat template, and conversations rendered by it."""

import functools
import json
from typing import Any

import jinja2

Message = dict[str, Any]
"""A message of a conversation, as chat templates see it."""

BOS, END, SYSTEM, USER, ASSISTANT, TOOL = "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
THINK, THINK_END, CALL, CALL_END = "<think>", "</think>", "<tool_call>", "</tool_call>"
SPECIAL_TOKENS = (BOS, END, SYSTEM, USER, ASSISTANT, TOOL, THINK, THINK_END, CALL, CALL_END)

# The `qwen2` pre-tokenizer of llama.cpp splits numbers into digits, so that the model can add column by column.
PRE_TOKENIZER = "qwen2"
PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|system|>' -}}
    {%- if has_system -%}{{- messages[0].content | trim ~ '\\n\\n' -}}{%- endif -%}
    {{- '# Tools' -}}
    {%- for tool in tools -%}{{- '\\n' ~ tool.function | tojson -}}{%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('the demo model knows the roles system, user, assistant and tool, not ' ~ message.role) -}}
    {%- endif -%}
    {%- if not (tools and has_system and loop.first) -%}
        {{- '<|' ~ message.role ~ '|>' -}}
        {%- if message.reasoning_content -%}
            {{- '<think>\\n' ~ message.reasoning_content | trim ~ '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- (message.content or '') | trim -}}
        {%- for call in message.tool_calls or [] -%}
            {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
            {{- call.function.arguments | tojson ~ '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
    {%- if enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""


def render(messages: list[Message], definitions: list[dict[str, Any]] | None = None, *, thinks: bool = False) -> str:
    """Returns a conversation as rendered by the chat template, ready for an answer if it does not end with one."""
    return _template().render(
        messages=messages,
        tools=definitions,
        bos_token=BOS,
        enable_thinking=thinks,
        add_generation_prompt=messages[-1]["role"] != "assistant",
    )


def answer(content: str, reasoning: str | None = None) -> Message:
    """Returns an answer with or without reasoning."""
    message: Message = {"role": "assistant", "content": content}
    return message if reasoning is None else message | {"reasoning_content": reasoning}


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)
