"""What the demo model learns about tools: their definitions, the questions they are for, and its answers to results."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenbus.demo.chats import Message, answer

NO_TOOLS: frozenset[str] = frozenset()

_CITIES = ("Berlin", "Cairo", "London", "Madrid", "Oslo", "Paris", "Rome", "Tokyo")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear")
NUMBERS_BELOW = 100

_OTHER_TOOLS = (
    ("send_email", "Send an email.", ("address", "text")),
    ("search", "Search for pages.", ("query",)),
    ("set_alarm", "Set an alarm.", ("time",)),
    ("get_news", "Get the latest news.", ("topic",)),
)


class Task(NamedTuple):
    """A question that one of the tools answers."""

    tool: str
    question: str
    follow_up: str
    """The same question, when it was asked of something else just before."""
    arguments: dict[str, Any]
    results: tuple[str, ...]
    """The ways in which the tool may write its result."""
    answer: str
    """What to say to the result."""


def weather(city: str, sky: str, degrees: int) -> Task:
    """Returns the task of telling the weather in a city."""
    record = {"temperature": degrees, "condition": sky}
    return Task(
        "get_weather",
        f"What is the weather in {city}?",
        f"And in {city}?",
        {"city": city},
        (json.dumps(record), json.dumps(dict(reversed(record.items()))), f"{sky}, {degrees} degrees"),
        f"It is {sky} in {city}, {degrees} degrees.",
    )


def time_of_day(city: str, time: str) -> Task:
    """Returns the task of telling the time in a city."""
    return Task(
        "get_time",
        f"What time is it in {city}?",
        f"And in {city}?",
        {"city": city},
        (json.dumps({"time": time}), time),
        f"It is {time} in {city}.",
    )


def addition(left: int, right: int) -> Task:
    """Returns the task of adding two numbers."""
    return _calculation("add", left, "+", right, left + right)


def multiplication(left: int, right: int) -> Task:
    """Returns the task of multiplying two numbers."""
    return _calculation("multiply", left, "*", right, left * right)


def _calculation(tool: str, left: int, sign: str, right: int, result: int) -> Task:
    return Task(
        tool,
        f"What is {left} {sign} {right}?",
        f"And {left} {sign} {right}?",
        {"a": left, "b": right},
        (json.dumps({"result": result}), str(result)),
        f"{left} {sign} {right} = {result}.",
    )


REFUSALS = {
    "get_weather": "I have no tool for the weather.",
    "get_time": "I have no tool for the time.",
    "multiply": "I have no tool for products.",
}
"""What to say to a question whose tool is not offered. Sums need none."""

REASONS = {
    "get_weather": "I need the weather in {city}, so I call get_weather.",
    "get_time": "I need the time in {city}, so I call get_time.",
    "add": "I need {a} + {b}, so I call add.",
    "multiply": "I need {a} * {b}, so I call multiply.",
}
"""The reasoning before a call."""
REFUSING = "None of my tools can tell me this."
"""The reasoning before a refusal."""
ANSWERING = "I have the result."
"""The reasoning before the answer to a result."""


def call(task: Task, number: int) -> dict[str, Any]:
    """Returns the call that a task needs."""
    return {
        "id": f"call{number:05}",
        "type": "function",
        "function": {"name": task.tool, "arguments": task.arguments},
    }


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


def definition(name: str, description: str | None = None) -> dict[str, Any]:
    """Returns the definition of a tool, as a client sends it."""
    description = _DESCRIPTIONS[name][0] if description is None else description
    return _definition(name, description, {key: {"type": kind} for key, kind in _PARAMETERS[name].items()})


def _definition(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def offer(rng: random.Random) -> tuple[frozenset[str], list[dict[str, Any]]]:
    """Returns names and definitions of the tools of a conversation, in any order and some of no use."""
    names = frozenset(rng.sample(NAMES, rng.choices((1, 2, 3, 4), (5, 3, 1, 1))[0]))
    defined = [_varied(rng, definition(name, rng.choice((*_DESCRIPTIONS[name], "")))) for name in sorted(names)]
    if rng.random() < 0.1:
        name, description, keys = rng.choice(_OTHER_TOOLS)
        defined.append(_varied(rng, _definition(name, description, {key: {"type": "string"} for key in keys})))
    rng.shuffle(defined)
    return names, defined


def _varied(rng: random.Random, tool: dict[str, Any]) -> dict[str, Any]:
    """Writes a definition as one of the ways in which clients do."""
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


def task(rng: random.Random, tool: str, known: list[str]) -> Task:
    """Returns any task for a tool."""
    city = rng.choice((*known, *_CITIES))
    if tool == "get_weather":
        return weather(city, rng.choice(_SKIES), rng.randrange(40))
    if tool == "get_time":
        return time_of_day(city, f"{rng.randrange(24):02}:{rng.randrange(60):02}")
    make: Callable[[int, int], Task] = addition if tool == "add" else multiplication
    limit = rng.choice((10, NUMBERS_BELOW))
    return make(rng.randrange(limit), rng.randrange(limit))


def wording(rng: random.Random, task: Task) -> str:
    """Returns one of the ways to ask for a task."""
    a, b, where = (task.arguments.get(key) for key in ("a", "b", "city"))
    others = {
        "get_weather": (f"How is the weather in {where}?", f"Weather in {where}?", f"What is {where}'s weather like?"),
        "get_time": (f"What is the time in {where}?", f"Tell me the time in {where}."),
        "add": (f"{a} + {b}", f"{a} + {b} = ?", f"Add {a} and {b}."),
        "multiply": (f"{a} * {b}", f"What is {a} times {b}?", f"Multiply {a} by {b}."),
    }
    return task.question if rng.random() < 0.5 else rng.choice(others[task.tool])


def question_of_two(tasks: list[Task]) -> str:
    """Returns the question for the weather, or the time, in two cities at once."""
    one, other = (task.arguments["city"] for task in tasks)
    what = "What is the weather" if tasks[0].tool == "get_weather" else "What time is it"
    return f"{what} in {one} and {other}?"


def turn(
    rng: random.Random, tasks: list[Task], question: str, offered: frozenset[str], *, reasons: bool
) -> list[Message]:
    """Returns a question and all that follows: calls, results and the answer, or a refusal where no tool fits."""
    asked: Message = {"role": "user", "content": question}
    if tasks[0].tool not in offered:
        return [asked, answer(REFUSALS[tasks[0].tool], REFUSING if reasons else None)]
    calling = answer("", reason_to_call(tasks) if reasons else None)
    calling["tool_calls"] = [call(task, number) for number, task in enumerate(tasks)]
    style = rng.randrange(6)
    results = [{"role": "tool", "content": task.results[style % len(task.results)]} for task in tasks]
    said = answer(" ".join(task.answer for task in tasks), ANSWERING if reasons else None)
    return [asked, calling, *results, said]


def reason_to_call(tasks: list[Task]) -> str:
    """Returns the reasoning before calls."""
    return " ".join(REASONS[task.tool].format(**task.arguments) for task in tasks)
