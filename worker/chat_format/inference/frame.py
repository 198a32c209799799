"""Finds the text that a template writes around an answer, and around its reasoning."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus.worker.chat_format.inference.probe import CONTENT, REASONING, TEXTS, TemplateProbe, call
from tokenbus.worker.contract.chat_format import ChatFormat, Reasoning

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
