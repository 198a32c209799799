"""Scores the parser's output by the suite's own checks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from canitoolcall import checks, chunking
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import CheckResult, Observation, ParseResult, Status, StreamAccumulator

from tests.worker.chat_format.recorded.outputs import IDS, generation_prompt_of, rules_of, tokens_of
from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.parser import AnswerParser


class Recorded(msgspec.Struct, frozen=True):
    """The known results of one way to read the outputs."""

    right: int
    misses: dict[str, str]
    """Why an output is not read as the suite expects."""


MODES = {"held": True, "streamed": False}
"""Whether calls are held until they are complete."""
RECORDED = msgspec.json.decode(Path(__file__).with_name("misses.json").read_bytes(), type=dict[str, Recorded])
STRATEGIES = chunking.parse_strategies(None)
Token = tuple[int, str]


def parser_for(fixture: Fixture, family: Family, *, hold_calls: bool) -> AnswerParser:
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in fixture.tools}
    return AnswerParser(
        rules_of(fixture, family),
        tools=tools,
        key=fixture.id,
        generation_prompt=generation_prompt_of(fixture, family),
        hold_calls=hold_calls,
    )


def read(parser: AnswerParser, groups: Sequence[Sequence[Token]], *, cut_off: bool) -> list[deltas.Delta]:
    """Returns all of a parser's output for tokens that arrive in groups."""
    found = [delta for group in groups for delta in parser.feed_tokens(group)]
    return found + parser.finish(cut_off=cut_off)


def whole(found: Sequence[deltas.Delta]) -> ParseResult:
    """Returns an answer as one response, without incomplete calls."""
    complete = {one.index for one in found if isinstance(one, deltas.CallEnd)}
    kept = [
        one
        for one in found
        if not isinstance(one, deltas.CallBegin | deltas.CallArguments | deltas.CallEnd) or one.index in complete
    ]
    return streamed(kept)


def streamed(found: Sequence[deltas.Delta]) -> ParseResult:
    """Returns an answer as a streaming client assembles it from what it received."""
    together = StreamAccumulator()
    for one in found:
        match one:
            case deltas.Content(text):
                together.add_content(text)
            case deltas.ReasoningDelta(text):
                together.add_reasoning(text)
            case deltas.CallBegin(index, _, name):
                together.add_tool_call(index, name)
            case deltas.CallArguments(index, fragment):
                together.add_tool_call(index, arguments=fragment)
            case deltas.CallEnd():
                pass
    return together.result()


def observe(fixture: Fixture, family: Family, *, hold_calls: bool) -> Observation:
    tokens = tokens_of(fixture)
    assert "".join(text for _, text in tokens) == fixture.raw_output
    assert fixture.tokenizer is not None
    special = {token for token in tokens if token[0] in IDS[fixture.tokenizer.repo].values()}
    cut_off = "truncated" in fixture.tags

    def parse(groups: Sequence[Sequence[Token]]) -> list[deltas.Delta]:
        return read(parser_for(fixture, family, hold_calls=hold_calls), groups, cut_off=cut_off)

    return Observation(
        nonstream=whole(parse([tokens])),
        streams={one.id: streamed(parse(chunking.split(tokens, one, special=special))) for one in STRATEGIES},
    )


def check(fixture: Fixture, family: Family, *, hold_calls: bool) -> tuple[Status, list[CheckResult]]:
    """Returns the verdict on a recorded output, and the messages of the checks that it fails."""
    rows = checks.run_checks(fixture, family, observe(fixture, family, hold_calls=hold_calls))
    return checks.case_status(rows), [row for row in rows if row.status is not Status.PASS]


def cases() -> list[tuple[Fixture, Family]]:
    """Returns all recorded outputs."""
    families = load_families()
    found = [(fixture, families[fixture.family]) for fixture in load_fixtures()]
    return sorted(found, key=lambda case: case[0].id)
