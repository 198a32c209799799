"""Turns a constraint into a grammar of llguidance; pure.

A constraint with a preamble becomes two grammars, one inside the other."""

import json
from typing import Any

from llguidance import LLMatcher, gbnf_to_lark

from tokenbus.worker import contract

_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON is written as Python's json.dumps does. With white space left to the model, some never stop writing it, and keys
could not be forced. A schema may want another style."""
_MAX_PROBLEM_CHARS = 200


class ConstraintError(Exception):
    """A constraint can't be compiled or followed; the message says why, in one line."""

    def __init__(self, problem: str) -> None:
        first, _, _ = problem.strip().partition("\n")
        super().__init__(first[:_MAX_PROBLEM_CHARS])


def to_grammar(constraint: contract.Constraint) -> str:
    """Raises ConstraintError for GBNF that can't be converted; llguidance finds all other errors."""
    body = _body(constraint)
    if not constraint.preamble:
        return json.dumps({"grammars": [body]})
    return json.dumps({"grammars": [{"name": "top", "lark_grammar": constraint.preamble}, {"name": "body"} | body]})


def _body(constraint: contract.Constraint) -> dict[str, Any]:
    source = constraint.source
    match constraint.kind:
        case contract.ConstraintKind.JSON_SCHEMA:
            schema: dict[str, Any] = json.loads(source)
            style = schema.get("x-guidance", {})
            return {"json_schema": schema | {"x-guidance": _JSON_STYLE | style if isinstance(style, dict) else style}}
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
    """Converts each rule to a rule. llguidance's own converter makes terminals of rules where it can, and those take as
    much text as they match: a number with white space behind it would swallow the line break that ends its line."""
    try:
        rules = gbnf_to_lark.GrammarParser().parse(source)
        gbnf_to_lark.resolve(rules)
        for rule in rules.values():
            rule.name = rule.name.lower()
        return "%llguidance {}\n" + "\n".join(map(str, rules.values()))
    except Exception as error:  # the converter raises whatever it stumbles over
        raise ConstraintError(str(error)) from error


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
