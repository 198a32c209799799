"""The tool tasks that the demo model learns: questions, calls, results and answers."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tools.demo_model.chats import Message, answer

NO_TOOLS: frozenset[str] = frozenset()

_CITIES = ("Berlin", "Cairo", "London", "Madrid", "Oslo", "Paris", "Rome", "Tokyo")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "stormy", "clear")
NUMBERS_BELOW = 100


class Task(NamedTuple):
    """A question answered by one of the tools."""

    tool: str
    question: str
    follow_up: str
    """The same question as a follow-up to one about something else."""
    arguments: dict[str, Any]
    results: tuple[str, ...]
    """The forms in which the tool may write its result."""
    answer: str
    """The words that follow the result."""


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
"""Answers to questions whose tool is not offered. Sums need none."""

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


def task(rng: random.Random, tool: str, known: list[str]) -> Task:
    """Returns a random task for a tool."""
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
    """Returns a question and everything that follows: calls, results and the answer, or a refusal if no tool fits."""
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
