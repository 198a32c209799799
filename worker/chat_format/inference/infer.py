"""Reads a chat format out of a chat template: renders known conversations and looks at what stands between the words.

Nothing here knows any family of models. A format that is found is only offered if it reads back what the template
itself writes (`read_back.py`). Templates that hide a part of their format are recognised by a text
(`known_formats.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tokenbus.worker.chat_format.inference.call_shape import Shape, find_call
from tokenbus.worker.chat_format.chat_format import Calls, ChatFormat, Reasoning
from tokenbus.worker.chat_format.known_formats import known_format, with_tokens
from tokenbus.worker.chat_format.inference.probe import CONTENT, IDS, REASONING, TEXTS, Probe, Render, call
from tokenbus.worker.chat_format.inference.read_back import reads_back

_SWITCHES = ("enable_thinking", "thinking")
_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Tags of reasoning that some templates only look for in what the model has written."""
_INDEX = re.compile(r"\d+")


def infer_format(render: Render, source: str, special_tokens: Mapping[str, int]) -> ChatFormat | None:
    """Returns how a model with this template writes its answers, or None if nothing but text is found in them.

    `render` should bound the time that a template may take in all, and raise when it is over."""
    try:
        return _infer(Probe(render, special_tokens), source, special_tokens)
    except Exception:  # a template can make any text: none of them may keep a model from being loaded
        return None


def _infer(probe: Probe, source: str, special_tokens: Mapping[str, int]) -> ChatFormat | None:
    for frame, form in _candidates(probe, source):
        found = with_tokens(_closed(probe, frame, form), special_tokens)
        if reads_back(probe, found, frame.opening, frame.ending):
            return found
    bare = _frame(probe, source, None)
    return with_tokens(bare.form, special_tokens) if bare is not None and bare.form.reasoning is not None else None


def _candidates(probe: Probe, source: str) -> Iterator[tuple[_Frame, ChatFormat]]:
    """Yields formats that may be the template's, one that says more than it shows first."""
    known = known_format(source)
    if known is not None and (around := _frame(probe, source, known.reasoning)) is not None:
        yield around, known if known.channels is not None else _in_frame(known, around.form)
    frame = _frame(probe, source, None)
    calls = _calls(probe, frame) if frame is not None else None
    if frame is not None and calls is not None:
        yield frame, msgspec.structs.replace(frame.form, calls=calls)


def _closed(probe: Probe, frame: _Frame, form: ChatFormat) -> ChatFormat:
    """Adds the last tag behind a call to those that end an answer, unless it belongs to the call."""
    text = probe.answer(call(0, TEXTS)) or ""
    tags = probe.atoms(text.removesuffix(probe.common_suffix(text, frame.ending)).rstrip())[-1:]
    calls = form.calls
    if calls is None or form.channels is not None:
        return form
    inner = (calls.call_close, calls.section_close, calls.announce_close)
    tags = [tag for tag in tags if len(tag) > 1 and not any(tag in marker for marker in inner)]
    opening = (calls.section_open or calls.call_open).strip()
    closing = tuple(tag for tag in dict.fromkeys((*form.turn_close, *tags)) if not opening.startswith(tag))
    return msgspec.structs.replace(form, turn_close=closing)


def _in_frame(known: ChatFormat, form: ChatFormat) -> ChatFormat:
    """Returns a known format with the ends of a turn as its template writes them."""
    return msgspec.structs.replace(
        known,
        reasoning=form.reasoning,
        turn_open=form.turn_open,
        generation_prompt=form.generation_prompt,
        turn_close=tuple(dict.fromkeys((*known.turn_close, *form.turn_close))),
    )


class _Frame(msgspec.Struct, frozen=True):
    """What stands around an answer."""

    form: ChatFormat
    """A format without calls."""
    opening: str
    """What stands between the user's words and an answer."""
    ending: str
    """What stands behind an answer."""


def _frame(probe: Probe, source: str, known: Reasoning | None) -> _Frame | None:
    prompt, nothing = probe.turn(), probe.turn(add_generation_prompt=False)
    said = probe.answer(content=CONTENT)
    if prompt is None or said is None or CONTENT not in said:
        return None
    before, _, ending = said.partition(CONTENT)
    opening = probe.common_prefix(prompt, before)
    called = probe.answer(call(0, TEXTS))
    if called is not None:
        opening = probe.common_prefix(opening, called)
    reasoning = _reasoning(probe, source, prompt, opening, known)
    if reasoning is not None:
        for tag in (reasoning.close.strip(), reasoning.open.strip()):
            opening = opening.rpartition(tag)[0] if tag in opening else opening
    content_open = before[len(opening) :]
    if reasoning is not None and (reasoning.open.strip() in content_open or reasoning.close.strip() in content_open):
        content_open = ""  # an empty reasoning, or the end of one
    elif reasoning is not None and reasoning.close.endswith(content_open):
        reasoning = msgspec.structs.replace(reasoning, close=reasoning.close.removesuffix(content_open))
    closing = ending
    if content_open.strip() and called is not None:
        closing = probe.common_suffix(ending, called) or ending
    else:
        content_open = ""
    start = opening.removeprefix(nothing) if nothing is not None and nothing != prompt else ""
    form = ChatFormat(
        reasoning=reasoning,
        content_open=content_open,
        content_close=ending.removesuffix(closing),
        turn_open=start,
        generation_prompt=prompt.removeprefix(opening) if prompt != nothing else "",
        turn_close=tuple(tag for tag in _first_tag(probe, closing) if not _begins(reasoning, tag)),
    )
    return _Frame(form, opening, closing)


def _first_tag(probe: Probe, ending: str) -> list[str]:
    """Returns the first token or tag of what stands behind an answer, if it begins with one."""
    atoms = probe.atoms(ending.strip())
    return atoms[:1] if atoms and len(atoms[0]) > 1 else []


def _begins(reasoning: Reasoning | None, tag: str) -> bool:
    """Returns whether a tag may also end a reasoning, behind which the answer goes on."""
    return reasoning is not None and reasoning.close.strip().startswith(tag)


def _reasoning(probe: Probe, source: str, prompt: str, opening: str, known: Reasoning | None) -> Reasoning | None:
    switch = next((name for name in _SWITCHES if _switched(probe, {name: True}, {name: False})), "")
    on: dict[str, Any] = {switch: True} if switch else {}
    if known is not None:
        shown = f"{source}{prompt}{probe.answer(content=CONTENT, reasoning=REASONING, **on)}"
        return msgspec.structs.replace(known, switch=switch) if known.close.strip() in shown else None
    prompted = prompt[len(opening) :]
    for before, close in (_around_content(probe, on), _around_call(probe, opening, prompted, on)):
        start = before[len(probe.common_prefix(opening, before)) :]
        if close.strip() and not start.strip():
            start = _prompted(probe, prompted, before, close)
        if start.strip() and close.strip():
            return Reasoning(open=start, close=close, switch=switch)
    for begin, end in _PAIRS:
        if end in source:
            return Reasoning(open=begin, close=end, switch=switch)
    return None


def _switched(probe: Probe, on: dict[str, Any], off: dict[str, Any]) -> bool:
    return probe.turn(**on) != probe.turn(**off)


def _around_content(probe: Probe, on: dict[str, Any]) -> tuple[str, str]:
    """Returns what stands before and behind reasoning that content follows."""
    text = probe.answer(content=CONTENT, reasoning=REASONING, **on) or ""
    before, _, rest = text.partition(REASONING)
    close, found, _ = rest.partition(CONTENT)
    return (before, close) if found else ("", "")


def _around_call(probe: Probe, opening: str, prompted: str, on: dict[str, Any]) -> tuple[str, str]:
    """Returns the same of reasoning that a call follows, if the prompt shows where it ends: by an empty one."""
    text = probe.answer(call(0, TEXTS), reasoning=REASONING, **on) or ""
    before, _, rest = text.partition(REASONING)
    start = before[len(probe.common_prefix(opening, before)) :]
    close = prompted.removeprefix(start)
    return (before, close) if start and close != prompted and rest.startswith(close) else ("", "")


def _prompted(probe: Probe, prompted: str, before: str, close: str) -> str:
    """Returns what opens a reasoning that every answer begins with: the end of the prompt, or of what stands before."""
    if prompted.strip() and close.strip() not in prompted:
        return prompted
    core = before.rstrip()
    last = probe.atoms(core)[-1:]
    return last[0] + before[len(core) :] if last and len(last[0]) > 1 else ""


def _calls(probe: Probe, frame: _Frame) -> Calls | None:
    """Returns how a template writes calls, or None if it does not show any that can be taken apart."""
    one = probe.answer(call(0, TEXTS))
    shape = find_call(probe, one, 0) if one is not None else None
    if one is None or shape is None:
        return None
    before = _without_reasoning(one[len(probe.common_prefix(frame.opening, one)) : shape.start], frame.form)
    behind = one[shape.end :]
    behind = behind.removesuffix(probe.common_suffix(behind, frame.ending))
    before = _wider(probe, before)
    calls = msgspec.structs.replace(shape.calls, id_length=9 if _wants_nine(probe) else 0)
    two = probe.answer(call(0, TEXTS), call(1, TEXTS))
    first = find_call(probe, two, 0) if two is not None else None
    second = find_call(probe, two, 1, first.end) if two is not None and first is not None else None
    if two is None or first is None or second is None:
        return msgspec.structs.replace(calls, call_open=before, call_close=behind, parallel=False)
    calls = _with_index(calls, first, second)
    return _with_markers(probe, calls, before, two[first.end : second.start], behind)


def _with_markers(probe: Probe, calls: Calls, before: str, between: str, behind: str) -> Calls:
    """Divides what stands before, between and behind calls into the markers of the section and of each call."""
    call_open = probe.common_suffix(before, between)
    call_open = call_open if call_open.strip() else ""
    between = between.removesuffix(call_open)
    call_close = probe.common_prefix(behind, between)
    call_close = call_close if call_close.strip() else ""
    section_open, section_close = before.removesuffix(call_open), behind.removeprefix(call_close)
    if not section_open.strip():
        call_open, section_open, section_close = section_open + call_open, "", ""
    return msgspec.structs.replace(
        calls,
        section_open=section_open,
        section_close=section_close,
        call_open=call_open,
        call_close=call_close,
        separator=between.removeprefix(call_close) if between.strip() else "",
    )


def _without_reasoning(text: str, form: ChatFormat) -> str:
    """Removes an empty reasoning, which many templates write before an answer."""
    close = form.reasoning.close if form.reasoning is not None else ""
    if close.strip() and close.strip() in text:
        text = text.rpartition(close.strip())[2]
        text = text.removeprefix(close[len(close.rstrip()) :])
    return text


def _wider(probe: Probe, before: str) -> str:
    """Returns the marker before a call with the whitespace that separates it from content."""
    text = probe.answer(call(0, TEXTS), content=CONTENT)
    shape = find_call(probe, text, 0) if text is not None else None
    if text is None or shape is None or CONTENT not in text[: shape.start]:
        return before
    other = text[: shape.start].rpartition(CONTENT)[2]
    return other if other.strip() == before.strip() else before


def _wants_nine(probe: Probe) -> bool:
    """Returns whether a template takes ids of nine letters and digits only."""
    return probe.answer(call(0, TEXTS) | {"id": f"call_{IDS[0]}"}) is None


def _with_index(calls: Calls, first: Shape, second: Shape) -> Calls:
    """Finds a number that counts the calls, between a name and what closes it."""
    one, other = first.calls.name_close, second.calls.name_close
    found, counted = _INDEX.search(one), _INDEX.search(other)
    if one == other or found is None or counted is None:
        return calls
    return msgspec.structs.replace(
        calls, header=f"{calls.header}{one[: found.start()]}{{index}}", name_close=one[found.end() :]
    )
