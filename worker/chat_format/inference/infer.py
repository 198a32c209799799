"""Infers a chat format from a chat template: renders known conversations and examines the text between the words.

Nothing here is specific to a family of models. A format is only used if it reads back what the template itself writes
(`read_back.py`). Templates that hide part of their format are recognised by a text (`known_formats.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from tokenbus.worker.chat_format.inference.call_shape import CallShape, find_call
from tokenbus.worker.chat_format.inference.frame import Frame, find_frame
from tokenbus.worker.chat_format.inference.probe import CONTENT, IDS, TEXTS, Render, TemplateProbe, call
from tokenbus.worker.chat_format.inference.read_back import reads_back
from tokenbus.worker.chat_format.known_formats import with_tokens
from tokenbus.worker.contract.chat_format import Calls, ChatFormat

_INDEX = re.compile(r"\d+")


def infer_format(
    render: Render, source: str, special_tokens: Mapping[str, int], known: ChatFormat | None
) -> ChatFormat | None:
    """Returns how a model with this template writes its answers, or None if they seem to be just text.

    `known`, the predefined format for such templates, is tried first. `render` should limit the total time that a
    template may take, and raise when it is used up."""
    probe = TemplateProbe(render, special_tokens)
    try:
        for frame, form in _candidates(probe, source, known):
            found = with_tokens(_closed(probe, frame, form), special_tokens)
            if reads_back(probe, found, frame.opening, frame.ending):
                return found
    except Exception:  # a template can produce any text: none may prevent a model from loading
        pass
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
