"""Turns a constraint into a grammar of llguidance; pure.

A constraint that begins after a marker becomes two grammars, one inside the other: free text until the marker, some
white space, and the constraint itself."""

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from tokenbus.worker import contract

_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON is written as Python's json.dumps does. With white space left to the model, some never stop writing it, and keys
could not be forced."""
_MAX_PROBLEM_CHARS = 200


class ConstraintError(Exception):
    """A constraint can't be compiled or followed; the message says why, in one line."""

    def __init__(self, problem: str) -> None:
        first, _, _ = problem.strip().partition("\n")
        super().__init__(first[:_MAX_PROBLEM_CHARS])


def to_grammar(constraint: contract.Constraint) -> str:
    """Raises ConstraintError for GBNF that can't be converted; llguidance finds all other errors."""
    body = _body(constraint)
    if constraint.preamble:
        return json.dumps({"grammars": [{"name": "top", "lark_grammar": constraint.preamble}, {"name": "body"} | body]})
    match constraint.begins_after:
        case None:
            grammars = [body]
        case int(token_id):
            grammars = [_after(f"TEXT <[{token_id}]>"), {"name": "body"} | body]
        case str(text):
            grammars = [_after(f"marker\nmarker[lazy]: TEXT {_literal(text)}"), {"name": "body"} | body]
    return json.dumps({"grammars": grammars})


def _body(constraint: contract.Constraint) -> dict[str, Any]:
    source = constraint.source
    match constraint.kind:
        case contract.ConstraintKind.JSON_SCHEMA:
            return {"json_schema": {"x-guidance": _JSON_STYLE} | json.loads(source)}
        case contract.ConstraintKind.REGEX:
            found: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]
            return {"lark_grammar": found["lark_grammar"]}
        case contract.ConstraintKind.CHOICE:
            return {"lark_grammar": "start: " + " | ".join(_literal(text) for text in json.loads(source))}
        case contract.ConstraintKind.GBNF:
            return {"lark_grammar": _from_gbnf(source)}
        case contract.ConstraintKind.LARK:
            return {"lark_grammar": source}


def _from_gbnf(source: str) -> str:
    try:
        lark: str = gbnf_to_lark(source)
    except Exception as error:  # the converter raises whatever it stumbles over
        raise ConstraintError(str(error)) from error
    return lark


def _after(marker: str) -> dict[str, Any]:
    rule, _, more = marker.partition("\n")
    return {"name": "top", "lark_grammar": f"start: {rule} /[ \\t\\r\\n]{{0,4}}/ @body\n{more}\nTEXT: /(.|\\n)*/"}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
