"""Schemas, grammars and regexes that are small and costly, deep, endless, or wrong, by name."""

import json
from typing import Any

DEEP = 60
"""Levels that a schema may nest, just below what the wire refuses."""


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _any_of_objects(count: int) -> dict[str, Any]:
    """Alternatives that differ at their end only."""
    return {
        "anyOf": [
            {"type": "object", "properties": {"a": {"type": "string"}, f"b{n}": {"const": n}}, "required": ["a"]}
            for n in range(count)
        ]
    }


def _all_of_any_of(count: int) -> dict[str, Any]:
    """2 ** count combinations, if they are multiplied out."""
    pair = [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "integer"}}}]
    return {"type": "object", "allOf": [{"anyOf": pair} for _ in range(count)]}


def _optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


def _chain(count: int) -> dict[str, Any]:
    """References that lead one to the next."""
    defs: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{count}": {"type": "integer"}}}


def _doubling(levels: int) -> dict[str, Any]:
    """Each definition uses the next one twice: 2 ** levels, if they are copied."""
    defs: dict[str, Any] = {
        f"d{n}": {
            "type": "object",
            "properties": {"l": {"$ref": f"#/$defs/d{n + 1}"}, "r": {"$ref": f"#/$defs/d{n + 1}"}},
            "required": ["l", "r"],
        }
        for n in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{levels}": {"type": "integer"}}}


def _pattern(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}


SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": _nested(DEEP),
    "any_of_objects": _any_of_objects(300),
    "one_of_objects": {"oneOf": _any_of_objects(300)["anyOf"]},
    "all_of_any_of": _all_of_any_of(60),
    "optional_properties": _optional(1_000),
    "chain_of_refs": _chain(900),
    "doubling_refs": _doubling(60),
    "ref_to_itself": {"$ref": "#"},
    "refs_in_a_circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "ref_to_nothing": {"$ref": "#/$defs/none"},
    "ref_to_the_network": {"$ref": "https://example.com/schema.json"},
    "ref_to_a_file": {"$ref": "file:///etc/passwd"},
    "unsatisfiable": {"type": "integer", "minimum": 2, "maximum": 1},
    "false": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "unknown_type": {"type": "poem"},
    "type_of_the_wrong_kind": {"type": 7},
    "properties_of_the_wrong_kind": {"type": "object", "properties": [1]},
    "huge_min_length": {"type": "string", "minLength": 10_000_000},
    "huge_max_length": {"type": "string", "maxLength": 2**62},
    "huge_min_items": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000},
    "huge_items_of_items": {
        "type": "array",
        "minItems": 10_000,
        "items": {"type": "array", "minItems": 10_000, "items": {"type": "array", "minItems": 10_000}},
    },
    "huge_numbers": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "long_decimals": {"type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 1e-300},
    "large_multiple": {"type": "integer", "multipleOf": 2**61 - 1},
    "large_enum": {"enum": [f"value {n}" for n in range(4_000)]},
    "long_const": {"const": "x" * 60_000},
    "pattern_of_repetitions": _pattern("^((a{1,100}){1,100}){1,100}$"),
    "pattern_of_look_behind": _pattern("(?<=a)b"),
    "pattern_of_far_choice": _pattern("^[ab]*a[ab]{40}$"),
    "pattern_of_unicode": _pattern(r"^\p{L}{0,1000}\p{N}{0,1000}$"),
    "large_multiple_of_few_bytes": {"type": "number", "multipleOf": 99_991, "minimum": 0},
    "pattern_of_optional_characters": _pattern("^" + ".?" * 15_000 + "$"),
    "endless_items_of_large_patterns": {
        "type": "array",
        "minItems": 1_000_000,
        "items": {"type": "string", "pattern": "a?" * 10_000},
    },
    "all_of_patterns": {"type": "string", "allOf": [{"pattern": f".*{n}.*[a-z]{{0,{n}}}"} for n in range(500)]},
    "white_space_of_its_own": {"type": "object", "x-guidance": {"whitespace_pattern": ".?" * 15_000}},
    "many_patterns": {
        "type": "object",
        "patternProperties": {f"^{'x' * n}[a-z]*{n}$": {"type": "string"} for n in range(1, 65)},
    },
}

REGEXES = {
    "repetitions_of_repetitions": "((a{1,1000}){1,1000}){1,1000}",
    "far_choice": "(a|b)*a(a|b){40}",
    "many_far_choices": "|".join(f"[ab]*a[ab]{{{n}}}c{n}" for n in range(10, 60)),
    "intersection_of_stars": ".*".join("abcdefghijklmnop") + "{1,500}",
    "deep_groups": "(" * 5_000 + "a" + ")" * 5_000,
    "deep_stars": "(" * 200 + "a" + ")*" * 200,
    "open_group": "(a",
    "unicode_classes": r"(\p{L}|\p{M}|\p{N}|\p{S}){1,2000}",
    "back_reference": r"(a)\1",
    "long_literal": "abc" * 5_000,
    "nothing": r"[^\s\S]",
    "optional_letters": "a?" * 2_000 + "a" * 2_000,
    "large_counts": "a{1,4000000000}",
    "optional_characters": ".?" * 8_000,
    "optional_letters_of_all_scripts": r"\w?" * 5_000,
    "stars_of_classes": r"(\w|\d|\s)*" * 1_200,
    "stars_and_letters": ".*a" * 5_000,
    "alternatives_of_classes": "|".join(rf"\p{{L}}{n}" for n in range(1_500)),
    "explodes_on_the_way": "[ab]{100}.{0,1000}x.{0,1000}y",
}

GBNFS = {
    "left_recursion": 'root ::= root "a" | "a"',
    "only_itself": "root ::= root",
    "endless": 'root ::= a\na ::= b\nb ::= a "x"',
    "ambiguous": 'root ::= root root | "a" | root "a" | "a" root',
    "deep_groups": "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000,
    "deep_repetitions": "root ::= " + "(" * 40 + '"a"' + "){1,9}" * 40,
    "large_counts": 'root ::= "a"{1000000000}',
    "counts_of_counts": 'root ::= a{1000}\na ::= b{1000}\nb ::= c{1000}\nc ::= "x" | "y"',
    "rule_without_a_name": "root ::= none",
    "open_text": 'root ::= "a',
    "no_root": 'start ::= "a"',
    "many_rules": "root ::= r0\n" + "".join(f'r{n} ::= "{n}" r{n + 1} | "x"\n' for n in range(490)) + 'r490 ::= "z"',
    "nullable": 'root ::= a a a a a a a a\na ::= b* c*\nb ::= c? d?\nc ::= d*\nd ::= "" | "x"',
    "empty": "root ::= ",
}

LARKS = {
    "left_recursion": 'start: start "a" | "a"',
    "ambiguous": 'start: start start | "a" | start "a" | "a" start\n',
    "terminal_that_uses_itself": 'start: A\nA: A "a" | "b"',
    "deep_groups": "start: " + "(" * 5_000 + '"a"' + ")" * 5_000,
    "unknown_rule": "start: none",
    "unknown_import": "%import other.NAME\nstart: NAME",
    "import_of_a_file": "%import .secret.NAME\nstart: NAME",
    "not_lark": "\x00\x01{{{",
    "intersection": 'start: /.*a.*/ & /.*b.*/',
    "terminals_that_overlap": "start: " + " ".join(f"T{n}" for n in range(300)) + "\n"
    + "\n".join(f"T{n}: /[a-z]*{n}[a-z]*/" for n in range(300)),
    "unknown_token": "start: <|nothing|>",
    "token_beyond_the_vocabulary": "start: <[4000000000]>",
    "deep_json": "start: %json " + '{"items": ' * 5_000 + "{}" + "}" * 5_000,
    "large_counts": 'start: "a"{1,1000000000}',
    "optional_characters": f"start: A\nA: /{'.?' * 15_000}/",
    "intersections": "start: A\nA: " + " & ".join(f"/.*{chr(97 + n % 26)}.*{n}.*/" for n in range(1_000)),
    "complement": "start: A\nA: ~(" + "|".join(f"/.*{chr(97 + n % 26)}.*{n}.*/" for n in range(1_000)) + ")",
    "small_and_ambiguous": "T0: /ccccyyy{50}(((xxxx))*?|[ab]|cccc)?/\n"
    'start: b+ T0+ b* "x"{1,99} | T0? "x"{1,99} | "x"* T0+ | T0\nb[lazy]: T0',
    "small_and_slow": 'T0: /(xxx)+(xxx)+(xxx)+(xxx)+(xxx)+/\n'
    'start: a+ T0{1,99} b? "x" | b | T0? T0 | T0\na[lazy]: T0\nb: T0 | b{1,99} | T0 T0? | T0',
}  # fmt: skip

ALL: dict[str, tuple[str, str]] = {
    **{f"json_schema: {name}": ("json_schema", json.dumps(schema)) for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": ("regex", source) for name, source in REGEXES.items()},
    **{f"gbnf: {name}": ("gbnf", source) for name, source in GBNFS.items()},
    **{f"lark: {name}": ("lark", source) for name, source in LARKS.items()},
}
"""The kind and the source of each: what the wire lets pass."""
