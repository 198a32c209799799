"""A model that answers by a script, for tests of what is around a model: an ONNX graph like any other.

The script is a list of lines. A line's answer is played when its cue is the last one in the conversation, whoever said
it: a user, a system message or a tool. So one script leads a client through a task of several turns. The answer is
what a model would sample, markers of reasoning and calls included, and goes through everything that other outputs go
through: sampler, constraints, detokenizer, parser, bus, gateway.

The graph is an automaton over bytes. Its cache holds, for each token, the state after it and the last cue seen, so
that prefixes can be shared and sequences be batched as with any model. The state runs through a tree of all cues with
links to the longest suffix (Aho and Corasick's); the end of `<|im_start|>assistant` leads into the answer of the last
cue, where each state has the one token that the model wants to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tokenbus.protocol.prompt import token_bound

CONTEXT = 131_072
DEFAULT_ANSWER = "There is no line for this."
_START, _END = "<|im_start|>", "<|im_end|>"
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MARKER_IDS = {text: 256 + place for place, text in enumerate((_START, _END, *_MARKERS))}
_VOCAB = 256 + len(MARKER_IDS)
_CERTAIN = 30.0
"""The logit of the wanted token; that of all others is 0."""
_TEMPLATE = """
{%- set first = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' ~ first ~ '\n\n# Tools\n\nCall them as <tool_call>\n{"name": ..., "arguments": ...}\n' -}}
  {{- '</tool_call>.\n' -}}
  {%- for tool in tools -%}{{- '\n' ~ tool | tojson -}}{%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- elif first -%}
  {{- '<|im_start|>system\n' ~ first ~ '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\n<tool_response>\n' ~ message.content ~ '\n</tool_response><|im_end|>\n' -}}
  {%- elif message.role != 'system' or not loop.first -%}
    {{- '<|im_start|>' ~ message.role ~ '\n' -}}
    {%- if message.reasoning_content -%}
      {{- '<think>\n' ~ message.reasoning_content | trim ~ '\n</think>\n\n' -}}
    {%- endif -%}
    {{- message.content or '' -}}
    {%- for call in message.tool_calls or [] -%}
      {%- if message.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
      {{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
      {{- call.function.arguments | tojson ~ '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""


class Line(NamedTuple):
    """A cue, and the answer that it is a cue for."""

    cue: str
    answer: str


def write(folder: Path, script: Sequence[Line], context: int = CONTEXT) -> Path:
    """Writes the model with its tokenizer and template, and returns its folder, to be served like any other."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_graph(_Automaton(script)), folder / "model.onnx")
    files: dict[str, Any] = {
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {"eos_token": _END, "add_bos_token": False},
        "config.json": {"max_position_embeddings": context, "eos_token_id": MARKER_IDS[_END]},
        "metadata.json": {"llm": {"max_sequence_length": context}},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def _tokenizer() -> dict[str, Any]:
    """Returns a tokenizer with a token for each byte and one for each marker."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            added | {"id": number, "content": text, "special": text not in _MARKERS}
            for text, number in MARKER_IDS.items()
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": token_bound.byte_letters(), "merges": []},
    }


def encode(text: str) -> list[int]:
    """Returns the tokens of an answer, in which markers are tokens of their own."""
    for marker, number in MARKER_IDS.items():
        before, found, after = text.partition(marker)
        if found:
            return [*encode(before), number, *encode(after)]
    return list(text.encode())


class _Automaton:
    """The tables of a script. State 0 is outside of answers, with nothing of a cue seen."""

    def __init__(self, script: Sequence[Line]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self.cue_of = [0]
        """The number of the line whose cue a state completes, from 1; 0 for none."""
        for number, line in enumerate(script, 1):
            self.cue_of[self._add(list(line.cue.encode()))] = number
        self.turn = self._add([MARKER_IDS[_START], *b"assistant\n"])
        """The state at which the model's turn begins."""
        self._link()
        self.starts: list[int] = []
        """The state in which a line's answer begins; first that of the answer without a cue."""
        self.wanted = [MARKER_IDS[_END]] * len(self.rows)
        """The token that the model wants to say in each state."""
        for answer in (DEFAULT_ANSWER, *(line.answer for line in script)):
            self._add_answer(encode(answer))

    def _add(self, tokens: Sequence[int]) -> int:
        state = 0
        for token in tokens:
            if token not in self._children[state]:
                self._children[state][token] = len(self._children)
                self._children.append({})
                self.cue_of.append(0)
            state = self._children[state][token]
        return state

    def _link(self) -> None:
        """Makes the rows: where each token leads from each state. A token that no cue goes on with leads on from the
        longest suffix with which one does."""
        self.rows = [np.zeros(_VOCAB, np.int32) for _ in self._children]
        todo = [(0, 0)]
        for state, suffix in todo:  # grows: a state's suffix is shorter, and therefore made before it
            self.rows[state][:] = self.rows[suffix] if state else 0
            self.cue_of[state] = self.cue_of[state] or self.cue_of[suffix]
            for token, child in self._children[state].items():
                todo.append((child, int(self.rows[suffix][token]) if state else 0))
                self.rows[state][token] = child

    def _add_answer(self, tokens: Sequence[int]) -> None:
        """Adds a state for each token of an answer. Any other token is passed over: what a template writes before the
        answer, or a constraint into it."""
        self.starts.append(len(self.rows))
        for token in (*tokens, MARKER_IDS[_END]):
            row = np.full(_VOCAB, len(self.rows), np.int32)
            row[token] = len(self.rows) + 1
            row[MARKER_IDS[_END]] = 0
            self.rows.append(row)
            self.wanted.append(token)
            self.cue_of.append(0)


def _graph(automaton: _Automaton) -> onnx.ModelProto:
    """Returns the automaton as a graph with a cache, whose keys are pairs of a state and the last cue's number."""
    constants = {
        "table": np.stack(automaton.rows).ravel(),
        "cue_of": automaton.cue_of,
        "wanted": automaton.wanted,
        "starts": automaton.starts,
        "turn": automaton.turn,
        "vocab": _VOCAB,
        "zero": 0,
        "one": 1,
        "first": [0],
        "second": [1],
        "last": [-1],
        "pair_axes": [1, 3],
        "column_before": [0, 1, 0, 0],
        "row_before": [0, 1, 0, 0, 0, 0],
    }
    nodes = [
        # The state before the new tokens is that of the last column that the mask shows, or 0 if there is none.
        _node("Squeeze", ["past_key_values.0.key", "second"], "past"),
        _node("Pad", ["past", "row_before"], "known"),
        _node("Shape", ["past"], "columns", start=1, end=2),
        _node("Slice", ["attention_mask", "first", "columns", "second"], "mask"),
        _node("Add", ["columns", "second"], "behind"),
        _node("Squeeze", ["behind"], "end"),
        _node("Range", ["one", "end", "one"], "places"),
        _node("Mul", ["mask", "places"], "shown"),
        _node("Pad", ["shown", "column_before"], "shown_or_none"),
        _node("ReduceMax", ["shown_or_none", "last"], "newest", keepdims=1),
        _node("GatherND", ["known", "newest"], "before", batch_dims=1),
        _node("Cast", ["before"], "before_ids", to=TensorProto.INT64),
        _node("Split", ["before_ids"], ["state_column", "cue_column"], axis=1, num_outputs=2),
        _node("Squeeze", ["state_column", "last"], "state"),
        _node("Squeeze", ["cue_column", "last"], "cue"),
        # From there one step for each token, of all rows at once.
        _node("Transpose", ["input_ids"], "by_token", perm=[1, 0]),
        _node("Scan", ["state", "cue", "by_token"], ["_s", "_c", "states", "cues"], num_scan_inputs=1, body=_step()),
        _node("Transpose", ["states"], "states_by_row", perm=[1, 0]),
        _node("Transpose", ["cues"], "cues_by_row", perm=[1, 0]),
        # What each state wants to say, and the cache with the new pairs.
        _node("Gather", ["wanted", "states_by_row"], "tokens"),
        _node("OneHot", ["tokens", "vocab", "certain"], "logits", axis=-1),
        _node("Unsqueeze", ["states_by_row", "pair_axes"], "new_states"),
        _node("Unsqueeze", ["cues_by_row", "pair_axes"], "new_cues"),
        _node("Concat", ["new_states", "new_cues"], "pairs", axis=3),
        _node("Cast", ["pairs"], "new", to=TensorProto.FLOAT),
        _node("Concat", ["past_key_values.0.key", "new"], "present.0.key", axis=2),
    ]
    floats, ints = TensorProto.FLOAT, TensorProto.INT64
    inputs = [
        helper.make_tensor_value_info("input_ids", ints, ["batch", "sequence"]),
        helper.make_tensor_value_info("attention_mask", ints, ["batch", "total"]),
        helper.make_tensor_value_info("position_ids", ints, ["batch", "sequence"]),
        helper.make_tensor_value_info("past_key_values.0.key", floats, ["batch", 1, "past", 2]),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", floats, ["batch", "sequence", _VOCAB]),
        helper.make_tensor_value_info("present.0.key", floats, ["batch", 1, "present", 2]),
    ]
    tensors = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()]
    tensors.append(numpy_helper.from_array(np.array([0.0, _CERTAIN], np.float32), "certain"))
    body = helper.make_graph(nodes, "script", inputs, outputs, tensors)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _step() -> onnx.GraphProto:
    """Returns the step from a state to the next one, of all rows at once."""
    nodes = [
        _node("Mul", ["in_state", "vocab"], "row"),
        _node("Add", ["row", "token"], "place"),
        _node("Gather", ["table", "place"], "reached"),
        _node("Gather", ["cue_of", "reached"], "seen"),
        _node("Greater", ["seen", "zero"], "is_cue"),
        _node("Where", ["is_cue", "seen", "in_cue"], "out_cue"),
        _node("Equal", ["reached", "turn"], "is_turn"),
        _node("Gather", ["starts", "out_cue"], "start"),
        _node("Where", ["is_turn", "start", "reached"], "out_state"),
        _node("Identity", ["out_state"], "each_state"),
        _node("Identity", ["out_cue"], "each_cue"),
    ]

    def rows(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.INT64, ["batch"])

    names = ("out_state", "out_cue", "each_state", "each_cue")
    return helper.make_graph(nodes, "step", [*map(rows, ("in_state", "in_cue", "token"))], [*map(rows, names)])


def _node(op: str, inputs: list[str], outputs: str | list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [outputs] if isinstance(outputs, str) else outputs, **attributes)
