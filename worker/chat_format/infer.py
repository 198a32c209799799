"""Infers a chat format from a chat template: renders known conversations and examines the text between the words.

Nothing here is specific to a family of models. A format is only used if it reads back what the template itself writes
(`probe.py`). Templates that hide part of their format are recognised by a text (`known_formats.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from tokenbus.worker.chat_format.known_formats import with_tokens
from tokenbus.worker.chat_format.probe import (
    CONTENT,
    IDS,
    KEYS,
    REASONING,
    TEXTS,
    VALUE_KEYS,
    Render,
    TemplateProbe,
    call,
    reads_back,
)
from tokenbus.worker.contract.chat_format import Calls, ChatFormat, Kind, Reasoning, Values

_INDEX = re.compile(r"\d+")


def infer_format(
    render: Render,
    source: str,
    special_tokens: Mapping[str, int],
    known: ChatFormat | None,
    on_error: Callable[[Exception], None] = lambda error: None,
) -> ChatFormat | None:
    """Returns how a model with this template writes its answers, or None if they seem to be just text.

    `known`, the predefined format for such templates, is tried first. `render` should limit the total time that a
    template may take, and raise when it is used up. `on_error` is called with an exception that has kept a format from
    being found."""
    probe = TemplateProbe(render, special_tokens)
    try:
        for frame, form in _candidates(probe, source, known):
            found = with_tokens(_closed(probe, frame, form), special_tokens)
            if reads_back(probe, found, frame.opening, frame.ending):
                return found
    except Exception as error:  # a template can produce any text: none may prevent a model from loading
        on_error(error)
    return None


def _candidates(probe: TemplateProbe, source: str, known: ChatFormat | None) -> Iterator[tuple[Frame, ChatFormat]]:
    """Yields formats that may be the template's, a predefined one that says more than the template shows first."""
    if known is not None and (around := find_frame(probe, source, known.reasoning)) is not None:
        yield around, known if known.channels is not None else _in_frame(known, around.form)
    frame = find_frame(probe, source, None)
    calls = _calls(probe, frame) if frame is not None else None
    if frame is not None and calls is not None:
        yield frame, msgspec.structs.replace(frame.form, calls=calls)
    if frame is not None and frame.form.reasoning is not None:
        yield frame, frame.form


def _closed(probe: TemplateProbe, frame: Frame, form: ChatFormat) -> ChatFormat:
    """Adds the last tag after a call to those that end an answer, unless it belongs to the call."""
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
    """Returns a known format with a turn's beginning and end as its template writes them."""
    return msgspec.structs.replace(
        known,
        reasoning=form.reasoning,
        turn_open=form.turn_open,
        generation_prompt=form.generation_prompt,
        turn_close=tuple(dict.fromkeys((*known.turn_close, *form.turn_close))),
    )


def _calls(probe: TemplateProbe, frame: Frame) -> Calls | None:
    """Returns how a template writes calls, or None if it shows none that can be analysed."""
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


def _with_markers(probe: TemplateProbe, calls: Calls, before: str, between: str, behind: str) -> Calls:
    """Divides the text before, between and after calls into the markers of the section and of each call."""
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


def _wider(probe: TemplateProbe, before: str) -> str:
    """Returns the marker before a call, including the whitespace that separates it from content."""
    text = probe.answer(call(0, TEXTS), content=CONTENT)
    shape = find_call(probe, text, 0) if text is not None else None
    if text is None or shape is None or CONTENT not in text[: shape.start]:
        return before
    other = text[: shape.start].rpartition(CONTENT)[2]
    return other if other.strip() == before.strip() else before


def _wants_nine(probe: TemplateProbe) -> bool:
    """Returns whether a template accepts only ids of nine letters and digits."""
    return probe.answer(call(0, TEXTS) | {"id": f"call_{IDS[0]}"}) is None


def _with_index(calls: Calls, first: CallShape, second: CallShape) -> Calls:
    """Finds a number that counts the calls, between a name and its closing marker."""
    one, other = first.calls.name_close, second.calls.name_close
    found, counted = _INDEX.search(one), _INDEX.search(other)
    if one == other or found is None or counted is None:
        return calls
    return msgspec.structs.replace(
        calls, header=f"{calls.header}{one[: found.start()]}{{index}}", name_close=one[found.end() :]
    )


_SWITCHES = ("enable_thinking", "thinking")
_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Reasoning tags that some templates never write, but look for in the model's output."""


class Frame(msgspec.Struct, frozen=True):
    """The text that a template writes around an answer."""

    form: ChatFormat
    """A format without calls."""
    opening: str
    """Separates the user's words from an answer."""
    ending: str
    """Follows an answer."""


def find_frame(probe: TemplateProbe, source: str, known: Reasoning | None) -> Frame | None:
    """Returns what a template writes around answers, or None if it does not render a plain one. `known` is the
    template's known reasoning, if any."""
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
    return Frame(form, opening, closing)


def _first_tag(probe: TemplateProbe, ending: str) -> list[str]:
    """Returns the first token or tag after an answer, if the following text begins with one."""
    atoms = probe.atoms(ending.strip())
    return atoms[:1] if atoms and len(atoms[0]) > 1 else []


def _begins(reasoning: Reasoning | None, tag: str) -> bool:
    """Returns whether a tag may also end a reasoning after which the answer continues."""
    return reasoning is not None and reasoning.close.strip().startswith(tag)


def _reasoning(
    probe: TemplateProbe, source: str, prompt: str, opening: str, known: Reasoning | None
) -> Reasoning | None:
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


def _switched(probe: TemplateProbe, on: dict[str, Any], off: dict[str, Any]) -> bool:
    return probe.turn(**on) != probe.turn(**off)


def _around_content(probe: TemplateProbe, on: dict[str, Any]) -> tuple[str, str]:
    """Returns the texts before and after reasoning that is followed by content."""
    text = probe.answer(content=CONTENT, reasoning=REASONING, **on) or ""
    before, _, rest = text.partition(REASONING)
    close, found, _ = rest.partition(CONTENT)
    return (before, close) if found else ("", "")


def _around_call(probe: TemplateProbe, opening: str, prompted: str, on: dict[str, Any]) -> tuple[str, str]:
    """Returns the same for reasoning followed by a call, if the prompt reveals where it ends by an empty reasoning."""
    text = probe.answer(call(0, TEXTS), reasoning=REASONING, **on) or ""
    before, _, rest = text.partition(REASONING)
    start = before[len(probe.common_prefix(opening, before)) :]
    close = prompted.removeprefix(start)
    return (before, close) if start and close != prompted and rest.startswith(close) else ("", "")


def _prompted(probe: TemplateProbe, prompted: str, before: str, close: str) -> str:
    """Returns the opening of a reasoning that begins every answer: the end of the prompt, or of the text before."""
    if prompted.strip() and close.strip() not in prompted:
        return prompted
    core = before.rstrip()
    last = probe.atoms(core)[-1:]
    return last[0] + before[len(core) :] if last and len(last[0]) > 1 else ""


_MAX_BRACES = 64
_decode = json.JSONDecoder().raw_decode


class CallShape(msgspec.Struct, frozen=True):
    """A call in a text: its position, and what its inside reveals about the format."""

    start: int
    end: int
    calls: Calls
    """Only the fields that concern a call's inside are set."""


def find_call(probe: TemplateProbe, text: str, place: int, start: int = 0) -> CallShape | None:
    """Finds the call of the `place`th known function, with the arguments TEXTS, after `start`."""
    name = call(place, TEXTS)["function"]["name"]
    at = text.find(name, start)
    if at < 0:
        return None
    return (
        _find_json(text, name, IDS[place], start)
        or _find_named(text, name, IDS[place], at, start)
        or _find_tagged(probe, text, name, at)
    )


def _objects(text: str, start: int) -> list[tuple[int, int, dict[str, Any]]]:
    """Returns the JSON objects in a text, outermost first."""
    found = []
    for brace in [one.start() for one in re.finditer(r"\{", text[start:])][:_MAX_BRACES]:
        try:
            value, end = _decode(text, start + brace)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append((start + brace, end, value))
    return found


def _find_json(text: str, name: str, call_id: str, start: int) -> CallShape | None:
    for begin, end, value in _objects(text, start):
        if value == {name: TEXTS}:
            return CallShape(begin, end, Calls(kind=Kind.JSON, name_key=""))
        name_key = next((key for key, one in value.items() if one == name), None)
        arguments_key = next((key for key, one in value.items() if one == TEXTS), None)
        if name_key is not None and arguments_key is not None:
            id_key = next((key for key, one in value.items() if one == call_id or str(one).isdigit()), "")
            calls = Calls(kind=Kind.JSON, name_key=name_key, arguments_key=arguments_key, id_key=id_key)
            return CallShape(begin, end, calls)
    return None


def _find_named(text: str, name: str, call_id: str, at: int, start: int) -> CallShape | None:
    begin, end = next(((begin, end) for begin, end, value in _objects(text, at) if value == TEXTS), (0, 0))
    if not end:
        return None
    header, name_close = "{name}", text[at + len(name) : begin]
    if call_id in name_close:
        before, _, name_close = name_close.partition(call_id)
        header += f"{before}{{id}}"
    elif (id_at := text.find(call_id, start, at)) >= 0:
        header = f"{{id}}{text[id_at + len(call_id) : at]}{header}"
        at = id_at
    return CallShape(at, end, Calls(kind=Kind.NAMED, header=header, name_close=name_close))


def _find_tagged(probe: TemplateProbe, text: str, name: str, at: int) -> CallShape | None:
    """Analyses a call whose arguments are written one by one."""
    bounds = [at + len(name)]
    for word in (KEYS[0], TEXTS[KEYS[0]], KEYS[1], TEXTS[KEYS[1]]):
        found = text.find(word, bounds[-1])
        if found < 0:
            return None
        bounds += [found, found + len(word)]
    opening, key_close, between, second = (text[bounds[i] : bounds[i + 1]] for i in (0, 2, 4, 6))
    rest = text[bounds[-1] :]
    if key_close != second:
        return None
    values = Values.TEXT
    if key_close[-1:] in ("'", '"') and between.startswith(key_close[-1]) and rest.startswith(key_close[-1]):
        key_close, between, rest = key_close[:-1], between[1:], rest[1:]
        values = Values.PYTHON if _behind_key(probe, "boolean", True).startswith(f"{key_close}True") else Values.JSON
    argument_open = probe.common_suffix(opening, between)
    closing = between.removesuffix(argument_open)
    value_close = probe.common_prefix(rest, closing)
    calls = Calls(
        kind=Kind.TAGGED,
        values=values,
        name_close=opening.removesuffix(argument_open),
        argument_open=argument_open,
        key_close=key_close,
        value_close=value_close,
        argument_separator=closing.removeprefix(value_close),
    )
    end = len(text) - len(rest) + len(value_close)
    return CallShape(at, end, _with_type(probe, calls) if values is Values.TEXT else calls)


def _behind_key(probe: TemplateProbe, kind: str, value: object) -> str:
    text = probe.answer(call(0, {VALUE_KEYS[kind]: value}))
    return text.rpartition(VALUE_KEYS[kind])[2] if text and VALUE_KEYS[kind] in text else ""


def _with_type(probe: TemplateProbe, calls: Calls) -> Calls:
    """Finds the type in the text before a value, if it differs between numbers and texts."""
    number = 123456789
    close = _behind_key(probe, "number", number).partition(str(number))[0]
    if not close or close == calls.key_close:
        return calls
    text_close = calls.key_close
    before = 0
    while before < min(len(close), len(text_close)) and close[before] == text_close[before]:
        before += 1
    key_close = re.sub(r"\w+$", "", text_close[:before])
    one, other = text_close[len(key_close) :], close[len(key_close) :]
    found, number_type = re.match(r"\w+", one), re.match(r"\w+", other)
    if not (key_close and found and number_type) or one[found.end() :] != other[number_type.end() :]:
        return calls
    return msgspec.structs.replace(calls, key_close=key_close, string_type=found[0], type_close=one[found.end() :])
