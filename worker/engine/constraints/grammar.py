"""Turns a constraint into an llguidance grammar, and decides which are small enough for the engine itself.

A constraint with a preamble becomes two grammars, one inside the other."""

import json
import re
from typing import Any

from llguidance import LLMatcher, gbnf_to_lark

from tokenbus.protocol.wire import errors
from tokenbus.worker.contract import engine_request

_Kind = engine_request.ConstraintKind
_MAX_BYTES = {_Kind.JSON_SCHEMA: 8_192, _Kind.REGEX: 512, _Kind.CHOICE: 16_384, _Kind.LARK: 16_384}
"""A Lark grammar that we have generated is small if the schemas in it are; a client's never is, nor is any in GBNF."""
_MAX_PATTERN_CHARS = 512
"""The total length of all patterns in a schema."""
_PATTERN = re.compile(r'"pattern"\s*:\s*"((?:[^"\\]|\\.)*)"')
_COSTLY = re.compile(r"multipleOf|patternProperties|whitespace_pattern|\\u")
"""`multipleOf` becomes a regex with a state for each remainder; name patterns are compared with each other; and an
escaped letter may hide any of these."""
_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON is formatted as by Python's json.dumps. If white space is left to the model, some models never stop writing it,
and keys could not be forced. A schema may specify another style."""
_MAX_PROBLEM_CHARS = 200
_PLACE = re.compile(r"at (\d+)\(\d+\): ")
_RULE = re.compile(r"\w+")
_REGEX_PROBLEM = re.compile(r'(?:invalid regex "(?P<quoted>.*)" \(in regex\): )?regex parse error:$')
_MAX_QUOTED_CHARS = 40
_QUOTED = re.compile(r'invalid regex ".*": ')
_LIMITS = re.compile(r"limits\.|[Tt]oo many|too complex|too large|fuel|takes too|takes more|; max is")
"""Errors contain one of these if a constraint exceeds a limit, llguidance's or ours."""
_REASON = re.compile(r"^error: (.+)", re.MULTILINE)


def is_small(constraint: engine_request.Constraint) -> bool:
    """Whether the engine itself may compile and follow a constraint.

    Nothing can stop llguidance in the middle of a call, and its own limits do not bound everything: a regex takes time
    quadratic in its length before any limit applies, and a sufficiently ambiguous 120-byte Lark grammar takes over four
    seconds for its first mask. So this bounds what makes a constraint costly. The bounds were found by attack
    (tests/worker/engine/constraints/test_small.py): of thousands of small constraints on a vocabulary of 150,000
    tokens, none took 0.1 s to compile or 10 ms for a mask."""
    source, kind = constraint.source, constraint.kind
    if kind is _Kind.GBNF or (kind is _Kind.LARK and not constraint.is_written):
        return False
    if len(source.encode()) > _MAX_BYTES[kind]:
        return False
    if kind in (_Kind.REGEX, _Kind.CHOICE):
        return True
    return not _COSTLY.search(source) and sum(map(len, _PATTERN.findall(source))) <= _MAX_PATTERN_CHARS


class ConstraintError(Exception):
    """A constraint can't be compiled or followed; the message says why, in one line. `line` is the faulty line of a
    Lark grammar, from 1, if known. `is_too_costly`: it takes too much time or memory."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        first, _, others = problem.strip().partition("\n")
        place = _PLACE.match(first)
        self.line = int(place[1]) if place else line
        self.is_too_costly = bool(_LIMITS.search(first))
        # for a regular expression the first line only says that it is invalid, and where
        found, reason = _REGEX_PROBLEM.search(first), _REASON.search(others)
        if found and reason:
            quoted = found["quoted"]
            shown = f'invalid regex "{quoted[:_MAX_QUOTED_CHARS]}": ' if quoted is not None else ""
            first = first[: found.start()] + shown + reason[1]
        super().__init__(first[:_MAX_PROBLEM_CHARS])


def to_problem(error: ConstraintError, constraint: engine_request.Constraint) -> errors.Error:
    """Returns the text that tells the client why a constraint can't be compiled."""
    problem, rule = str(error), None
    if error.line is not None and constraint.kind is engine_request.ConstraintKind.LARK:
        lines = constraint.source.split("\n")
        rule = _RULE.match(lines[error.line - 1]) if error.line <= len(lines) else None
    param = constraint.rule_params.get(rule[0], constraint.param) if rule else constraint.param
    if constraint.kind is engine_request.ConstraintKind.REGEX:
        problem = _QUOTED.sub("", problem, 1)  # the field is the regex
    if param != constraint.param or constraint.kind is not engine_request.ConstraintKind.LARK:
        problem = _PLACE.sub("", problem)  # a place in a grammar that the client has never seen
    return errors.invalid_field(param, problem).error


def to_grammar(constraint: engine_request.Constraint) -> str:
    """Raises ConstraintError for GBNF that can't be converted; llguidance finds all other errors."""
    body = _body(constraint)
    if not constraint.preamble:
        return json.dumps({"grammars": [body]})
    return json.dumps({"grammars": [{"name": "top", "lark_grammar": constraint.preamble}, {"name": "body"} | body]})


def _body(constraint: engine_request.Constraint) -> dict[str, Any]:
    source = constraint.source
    match constraint.kind:
        case engine_request.ConstraintKind.JSON_SCHEMA:
            schema: dict[str, Any] = json.loads(source)
            style = schema.get("x-guidance", {})
            return {"json_schema": schema | {"x-guidance": _JSON_STYLE | style if isinstance(style, dict) else style}}
        case engine_request.ConstraintKind.REGEX:
            found: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]
            return {"lark_grammar": found["lark_grammar"]}
        case engine_request.ConstraintKind.CHOICE:
            return {"lark_grammar": "start: " + " | ".join(_literal(text) for text in json.loads(source))}
        case engine_request.ConstraintKind.GBNF:
            return {"lark_grammar": _from_gbnf(source)}
        case engine_request.ConstraintKind.LARK:
            return {"lark_grammar": source}


def _from_gbnf(source: str) -> str:
    """Converts each rule to a rule. llguidance's own converter turns rules into terminals where it can, and those match
    greedily: a number followed by white space would swallow the line break that ends its line."""
    try:
        rules = gbnf_to_lark.GrammarParser().parse(source)
        gbnf_to_lark.resolve(rules)
        for rule in rules.values():
            rule.name = rule.name.lower()
        return "%llguidance {}\n" + "\n".join(map(str, rules.values()))
    except Exception as error:  # the converter raises all kinds of errors
        raise ConstraintError(str(error)) from error


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
