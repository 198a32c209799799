"""Predefined formats, for templates that do not reveal their whole format.

A template is recognised by texts that it contains. Entries are tried in order.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.worker.contract.chat_format import Calls, Channels, ChatFormat, Kind, Reasoning, Values

THINK = Reasoning(open="<think>", close="</think>", switch="enable_thinking")
THINK_LINES = Reasoning(open="<think>\n", close="\n</think>\n\n", switch="enable_thinking")


def _markup(section: str, space: str = "") -> Calls:
    """Returns calls in DeepSeek's markup, whose versions differ only in a name and a space."""
    mark = f"｜DSML｜{space}"
    return Calls(
        kind=Kind.TAGGED,
        values=Values.TEXT,
        section_open=f"\n\n<{mark}{section}>\n",
        section_close=f"</{mark}{section}>",
        call_open=f'<{mark}invoke name="',
        name_close='">\n',
        argument_open=f'<{mark}parameter name="',
        key_close='" string="',
        type_close='">',
        string_type="true",
        value_close=f"</{mark}parameter>\n",
        call_close=f"</{mark}invoke>\n",
    )


def _arrays_of_names(reasoning: Reasoning | None) -> ChatFormat:
    return ChatFormat(
        calls=Calls(
            kind=Kind.NAMED,
            call_open="[TOOL_CALLS]",
            header="{name}[CALL_ID]{id}",
            name_close="[ARGS]",
            id_length=9,
        ),
        reasoning=reasoning,
        turn_open="[/INST]",
    )


class KnownFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format and the templates it belongs to."""

    name: str
    contains: tuple[str, ...]
    """Texts that the template must all contain."""
    format: ChatFormat


KNOWN_FORMATS = (
    KnownFormat(
        name="gpt-oss",
        contains=("<|channel|>", "<|message|>", "functions."),
        format=ChatFormat(
            calls=Calls(kind=Kind.NAMED),
            channels=Channels(
                start="<|start|>assistant",
                channel="<|channel|>",
                body="<|message|>",
                ends=("<|end|>", "<|call|>", "<|return|>"),
                recipient=" to=",
                constrain="<|constrain|>",
                function="functions.",
                reasoning=("analysis",),
                content=("final", "commentary"),
            ),
            generation_prompt="<|start|>assistant",
        ),
    ),
    KnownFormat(
        name="gemma-4",
        contains=("<|tool_call>call:", '<|"|>'),
        format=ChatFormat(
            calls=Calls(
                kind=Kind.NAMED,
                values=Values.BARE_KEYS,
                quote='<|"|>',
                call_open="<|tool_call>call:",
                call_close="<tool_call|>",
            ),
            reasoning=Reasoning(open="<|channel>thought\n", close="\n<channel|>", switch="enable_thinking"),
            turn_open="<|turn>model\n",
        ),
    ),
    KnownFormat(
        name="kimi-k3",
        contains=("<|open|>", "<|sep|>"),
        format=ChatFormat(
            calls=Calls(
                kind=Kind.TAGGED,
                values=Values.TEXT,
                section_open="<|open|>tools<|sep|>",
                section_close="<|close|>tools<|sep|>",
                call_open='<|open|>call tool="',
                header='{name}" index="{index}',
                name_close='"<|sep|>',
                argument_open='<|open|>argument key="',
                key_close='" type="',
                type_close='"<|sep|>',
                string_type="string",
                value_close="<|close|>argument<|sep|>",
                call_close="<|close|>call<|sep|>",
                keys_escaped=True,
            ),
            reasoning=Reasoning(open="<|open|>think<|sep|>", close="<|close|>think<|sep|>", switch="thinking"),
            content_open="<|open|>response<|sep|>",
            content_close="<|close|>response<|sep|>",
            turn_open='<|open|>message role="assistant"<|sep|>',
            generation_prompt="<|open|>think<|sep|>",
            turn_close=("<|close|>message<|sep|>",),
        ),
    ),
    KnownFormat(
        name="kimi-k2",
        contains=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
        format=ChatFormat(
            calls=Calls(
                kind=Kind.NAMED,
                section_open="<|tool_calls_section_begin|>",
                section_close="<|tool_calls_section_end|>",
                call_open="<|tool_call_begin|>",
                header="functions.{name}:{index}",
                id_form="functions.{name}:{index}",
                name_close="<|tool_call_argument_begin|>",
                call_close="<|tool_call_end|>",
            ),
            reasoning=THINK,
            turn_open="<|im_assistant|>assistant<|im_middle|>",
        ),
    ),
    KnownFormat(
        name="mistral-reasoning",
        contains=("[TOOL_CALLS]", "[ARGS]", "[THINK]"),
        format=_arrays_of_names(Reasoning(open="[THINK]", close="[/THINK]")),
    ),
    KnownFormat(
        name="mistral-reasoning-text",
        contains=("[TOOL_CALLS]", "[ARGS]", "<think>"),
        format=_arrays_of_names(Reasoning(open="<think>\n", close="\n</think>\n")),
    ),
    KnownFormat(name="mistral", contains=("[TOOL_CALLS]", "[ARGS]"), format=_arrays_of_names(None)),
    KnownFormat(
        name="mistral-array",
        contains=("[TOOL_CALLS]",),
        format=ChatFormat(
            calls=Calls(
                kind=Kind.JSON,
                section_open="[TOOL_CALLS] [",
                section_close="]",
                separator=", ",
                id_key="id",
                id_length=9,
            ),
            turn_open="[/INST]",
        ),
    ),
    KnownFormat(
        name="deepseek-v4.1",
        contains=("｜DSML｜ calls",),
        format=ChatFormat(
            calls=_markup("calls", " "), reasoning=THINK, turn_open="<｜Assistant｜>", generation_prompt="</think>"
        ),
    ),
    KnownFormat(
        name="deepseek-v4",
        contains=("｜DSML｜", "tool_calls"),
        format=ChatFormat(
            calls=_markup("tool_calls"), reasoning=THINK, turn_open="<｜Assistant｜>", generation_prompt="</think>"
        ),
    ),
    KnownFormat(
        name="deepseek-v3.2",
        contains=("｜DSML｜", "function_calls"),
        format=ChatFormat(
            calls=_markup("function_calls"), reasoning=THINK, turn_open="<｜Assistant｜>", generation_prompt="</think>"
        ),
    ),
    KnownFormat(
        name="deepseek-v3",
        contains=("<｜tool▁call▁begin｜>", "```json"),
        format=ChatFormat(
            calls=Calls(
                kind=Kind.NAMED,
                section_open="<｜tool▁calls▁begin｜>",
                section_close="<｜tool▁calls▁end｜>",
                call_open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                name_close="\n```json\n",
                call_close="\n```<｜tool▁call▁end｜>",
            ),
            reasoning=THINK_LINES,
            turn_open="<｜Assistant｜>",
        ),
    ),
    KnownFormat(
        name="deepseek-v3.1",
        contains=("<｜tool▁call▁begin｜>",),
        format=ChatFormat(
            calls=Calls(
                kind=Kind.NAMED,
                section_open="<｜tool▁calls▁begin｜>",
                section_close="<｜tool▁calls▁end｜>",
                call_open="<｜tool▁call▁begin｜>",
                name_close="<｜tool▁sep｜>",
                call_close="<｜tool▁call▁end｜>",
            ),
            reasoning=THINK,
            turn_open="<｜Assistant｜>",
            generation_prompt="</think>",
        ),
    ),
    KnownFormat(
        name="glm-lines",
        contains=("<arg_key>", "'\\n<tool_call>'"),
        format=ChatFormat(
            calls=Calls(
                kind=Kind.TAGGED,
                values=Values.TEXT,
                call_open="\n<tool_call>",
                name_close="\n",
                argument_open="<arg_key>",
                key_close="</arg_key>\n<arg_value>",
                value_close="</arg_value>\n",
                call_close="</tool_call>",
            ),
            reasoning=Reasoning(open="\n<think>", close="</think>\n", switch="enable_thinking"),
            turn_open="<|assistant|>",
        ),
    ),
    KnownFormat(
        name="glm",
        contains=("<arg_key>",),
        format=ChatFormat(
            calls=Calls(
                kind=Kind.TAGGED,
                values=Values.TEXT,
                call_open="<tool_call>",
                argument_open="<arg_key>",
                key_close="</arg_key><arg_value>",
                value_close="</arg_value>",
                call_close="</tool_call>",
            ),
            reasoning=THINK,
            turn_open="<|assistant|>",
            generation_prompt="<think>",
        ),
    ),
    KnownFormat(
        name="qwen-tags",
        contains=("<tool_call>", "<function=", "<parameter="),
        format=ChatFormat(
            calls=Calls(
                kind=Kind.TAGGED,
                values=Values.TEXT,
                section_open="\n\n<tool_call>\n",
                section_close="</tool_call>",
                section_optional=True,
                call_open="\n<function=",
                name_close=">\n",
                argument_open="<parameter=",
                key_close=">\n",
                value_close="\n</parameter>\n",
                call_close="</function>\n",
            ),
            reasoning=Reasoning(open="<think>\n", close="\n</think>\n\n", ended_by_call=True, switch="enable_thinking"),
            turn_open="<|im_start|>assistant\n",
        ),
    ),
    KnownFormat(
        name="hermes",
        contains=("<tool_call>", '{"name": '),
        format=ChatFormat(
            calls=Calls(kind=Kind.JSON, call_open="\n<tool_call>\n", call_close="\n</tool_call>"),
            reasoning=THINK_LINES,
            turn_open="<|im_start|>assistant\n",
        ),
    ),
    KnownFormat(
        name="llama-4",
        contains=("<|python_start|>",),
        format=ChatFormat(
            calls=Calls(
                kind=Kind.TAGGED,
                values=Values.PYTHON,
                announce="<|python_start|>",
                section_open="[",
                section_close="]",
                separator=", ",
                name_close="(",
                key_close="=",
                argument_separator=", ",
                call_close=")",
                announce_close="<|python_end|>",
            ),
            turn_open="<|header_start|>assistant<|header_end|>\n\n",
        ),
    ),
    KnownFormat(
        name="llama-3",
        contains=("<|python_tag|>",),
        format=ChatFormat(
            calls=Calls(kind=Kind.JSON, announce="<|python_tag|>", arguments_key="parameters", parallel=False),
            turn_open="<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ),
)


def known_format(template: str) -> ChatFormat | None:
    """Returns a template's predefined format, if any. Its `tokens` are empty."""
    for known in KNOWN_FORMATS:
        if all(text in template for text in known.contains):
            return known.format
    return None


def with_tokens(form: ChatFormat, ids: Mapping[str, int]) -> ChatFormat:
    """Adds the ids of the tokenizer's special tokens that the format's markers contain."""
    markers = "\n".join(_texts(msgspec.to_builtins(msgspec.structs.replace(form, tokens={}))))
    return msgspec.structs.replace(form, tokens={text: token for text, token in ids.items() if text in markers})


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for one in inner for text in _texts(one)]
