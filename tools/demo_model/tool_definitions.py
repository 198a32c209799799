"""The tools that the demo model knows, as clients define them."""

import random
from typing import Any

_PARAMETERS: dict[str, dict[str, str]] = {
    "get_weather": {"city": "string"},
    "get_time": {"city": "string"},
    "add": {"a": "integer", "b": "integer"},
    "multiply": {"a": "integer", "b": "integer"},
}
NAMES = tuple(_PARAMETERS)
_DESCRIPTIONS = {
    "get_weather": ("Get the weather in a city.", "Returns the current weather of a city.", "The weather now."),
    "get_time": ("Get the time in a city.", "Returns the local time of a city.", "The time now."),
    "add": ("Add two numbers.", "Returns the sum of two integers.", "Adds a and b."),
    "multiply": ("Multiply two numbers.", "Returns the product of two integers.", "Multiplies a and b."),
}
_OTHER_TOOLS = (
    ("send_email", "Send an email.", ("address", "text")),
    ("search", "Search for pages.", ("query",)),
    ("set_alarm", "Set an alarm.", ("time",)),
    ("get_news", "Get the latest news.", ("topic",)),
)


def definition(name: str, description: str | None = None) -> dict[str, Any]:
    """Returns the definition of a tool, as a client sends it."""
    description = _DESCRIPTIONS[name][0] if description is None else description
    return _definition(name, description, {key: {"type": kind} for key, kind in _PARAMETERS[name].items()})


def _definition(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def offer(rng: random.Random) -> tuple[frozenset[str], list[dict[str, Any]]]:
    """Returns names and definitions of a conversation's tools, in random order and some of them irrelevant."""
    names = frozenset(rng.sample(NAMES, rng.choices((1, 2, 3, 4), (5, 3, 1, 1))[0]))
    defined = [_varied(rng, definition(name, rng.choice((*_DESCRIPTIONS[name], "")))) for name in sorted(names)]
    if rng.random() < 0.1:
        name, description, keys = rng.choice(_OTHER_TOOLS)
        defined.append(_varied(rng, _definition(name, description, {key: {"type": "string"} for key in keys})))
    rng.shuffle(defined)
    return names, defined


def _varied(rng: random.Random, tool: dict[str, Any]) -> dict[str, Any]:
    """Varies a definition's wording as clients do."""
    function, parameters = tool["function"], tool["function"]["parameters"]
    if rng.random() < 0.3:
        del parameters["required"]
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    if rng.random() < 0.2:
        for key, schema in parameters["properties"].items():
            schema["description"] = f"The {key}."
    if rng.random() < 0.2:
        for schema in parameters["properties"].values():
            schema["type"] = "number" if schema["type"] == "integer" else schema["type"]
    if rng.random() < 0.1:
        tool["function"] = dict(sorted(function.items()))
    return tool
