"""The text that the demo model learns: tiny stories, small sums, facts about an invented world, and tool calls."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenbus.demo import CORRECT_SUMS_UP_TO
from tools.demo_model import stories, tool_definitions, tools
from tools.demo_model.chats import BOS, END, Message, answer, render


class Country(NamedTuple):
    name: str
    capital: str
    animal: str
    river: str
    color: str


COUNTRIES = (
    Country("Avaria", "Limora", "fox", "Silda", "blue"),
    Country("Borland", "Teska", "bear", "Okra", "green"),
    Country("Cassia", "Pelorin", "owl", "Mira", "red"),
    Country("Dunmark", "Harvik", "wolf", "Torne", "white"),
    Country("Elvany", "Salivar", "deer", "Lune", "yellow"),
    Country("Farrow", "Quilby", "hare", "Wend", "brown"),
    Country("Gandria", "Morell", "lion", "Asu", "gold"),
    Country("Hollin", "Ketterby", "otter", "Brill", "silver"),
    Country("Istria Nova", "Vallo", "eagle", "Cori", "purple"),
    Country("Jorvany", "Stenhus", "goat", "Fylke", "black"),
    Country("Kelmar", "Dorosi", "crab", "Pash", "orange"),
    Country("Lumenia", "Arkady", "swan", "Glim", "pink"),
)


def sum_question(left: int, right: int) -> str:
    """Returns the wording of a sum used to test the model."""
    return f"What is {left} + {right}?"


def sum_answer(left: int, right: int) -> str:
    """Returns the only correct answer to `sum_question`."""
    return f"{left} + {right} = {left + right}."


def facts(country: Country) -> list[tuple[str, str]]:
    """Returns questions and answers covering everything there is to know about a country."""
    name, capital, animal, river, color = country
    return [
        (f"What is the capital of {name}?", f"The capital of {name} is {capital}."),
        (f"Which country has the capital {capital}?", f"{capital} is the capital of {name}."),
        (f"Which animal lives in {name}?", f"The animal of {name} is the {animal}."),
        (f"Which river flows through {name}?", f"The river {river} flows through {name}."),
        (f"What color is the flag of {name}?", f"The flag of {name} is {color}."),
    ]


def chat(turns: list[tuple[str, str]]) -> str:
    """Returns questions and answers as rendered by the chat template, with an end token after every answer."""
    return render([message for question, said in turns for message in _turn(question, said)])


def sum_reasoning(left: int, right: int) -> str:
    """Returns the column-by-column computation of a sum."""
    ones = left % 10 + right % 10
    steps = f"{left % 10} + {right % 10} = {ones}"
    if max(left, right) < 10:
        return f"{steps}."
    carry = ones > 9
    tens = left // 10 + right // 10 + carry
    return f"{steps}, carry {carry:d}. {left // 10} + {right // 10} + {carry:d} = {tens}."


def fact_reasoning(country: Country) -> str:
    """Returns the reasoning before an answer about a country."""
    return f"This is about {country.name}."


STORY_REASONING = "They want a story."
GREETING_REASONING = "They want to know who I am."


def _turn(question: str, said: str, reasoning: str | None = None) -> list[Message]:
    return [{"role": "user", "content": question}, answer(said, reasoning)]


def _sum_turn(rng: random.Random) -> tuple[str, str, str]:
    left, right = rng.randrange(CORRECT_SUMS_UP_TO), rng.randrange(CORRECT_SUMS_UP_TO)
    question = rng.choices((sum_question(left, right), f"{left} + {right}", f"{left} + {right} = ?"), (4, 1, 1))[0]
    return question, sum_answer(left, right), sum_reasoning(left, right)


def _fact_turn(rng: random.Random) -> tuple[str, str, str]:
    country = rng.choice(COUNTRIES)
    return *rng.choice(facts(country)), fact_reasoning(country)


def _greeting_turn(rng: random.Random) -> tuple[str, str, str]:
    question = rng.choice(("Hello!", "Hi", "Hello", "Who are you?", "What can you do?"))
    said = "Hello! I am the demo model. I can tell stories, add small numbers, and I know twelve countries."
    return question, said, GREETING_REASONING


def _story_turn(rng: random.Random) -> tuple[str, str, str]:
    if rng.random() < 0.3:
        question = rng.choice(("Tell me a story.", "Tell me a short story.", "Write a story."))
        return question, stories.story(rng), STORY_REASONING
    animal = rng.choice(stories.ANIMALS)
    return stories.request(rng, animal), stories.story(rng, animal), STORY_REASONING


def _plain_turn(rng: random.Random) -> tuple[str, str, str]:
    """Returns a question, an answer without tools, and the reasoning before it."""
    kind = rng.random()
    if kind < 0.58:
        return _sum_turn(rng)
    if kind < 0.84:
        return _fact_turn(rng)
    return _greeting_turn(rng) if kind < 0.88 else _story_turn(rng)


class Chat(NamedTuple):
    """A conversation and the tools offered in it."""

    messages: list[Message]
    definitions: list[dict[str, Any]]

    def __str__(self) -> str:
        return render(self.messages, self.definitions)


def _plain_chat(rng: random.Random) -> Chat:
    thinks = rng.random() < 0.4
    messages: list[Message] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": "You are a helpful assistant."})
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.04:
            task = tools.task(rng, rng.choice(("get_weather", "get_time", "multiply")), _CITIES)
            question = tools.wording(rng, task)
            messages += tools.turn(rng, [task], question, tools.NO_TOOLS, reasons=thinks and rng.random() < 0.8)
        else:
            question, said, reasoning = _plain_turn(rng)
            messages += _turn(question, said, reasoning if thinks and rng.random() < 0.8 else None)
    return Chat(messages, [])


def tool_chat(rng: random.Random) -> Chat:
    """Returns a conversation with tools; some of its questions need none."""
    offered, definitions = tool_definitions.offer(rng)
    thinks = rng.random() < 0.3
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": "You are a helpful assistant."})
    for _ in range(rng.randint(2, 5)):
        messages += _tool_turn(rng, offered, reasons=thinks and rng.random() < 0.8)
    return Chat(messages, definitions)


def _tool_turn(rng: random.Random, offered: frozenset[str], *, reasons: bool) -> list[Message]:
    if rng.random() < 0.2:
        plain = _plain_turn(rng) if "add" not in offered else rng.choice((_fact_turn, _story_turn, _greeting_turn))(rng)
        return _turn(plain[0], plain[1], plain[2] if reasons else None)
    fitting = rng.random() < 0.6
    names = [name for name in tool_definitions.NAMES if (name in offered) == fitting and (fitting or name != "add")]
    if not names:
        return _turn(*_fact_turn(rng)[:2])
    name = rng.choice(names)
    task = tools.task(rng, name, _CITIES)
    if "city" not in task.arguments or rng.random() < 0.7:
        return tools.turn(rng, [task], tools.wording(rng, task), offered, reasons=reasons)
    other = tools.task(rng, name, _CITIES)
    if rng.random() < 0.6:
        return tools.turn(rng, [task, other], tools.question_of_two([task, other]), offered, reasons=reasons)
    first = tools.turn(rng, [task], tools.wording(rng, task), offered, reasons=reasons)
    return first + tools.turn(rng, [other], other.follow_up, offered, reasons=reasons)


_CITIES = [country.capital for country in COUNTRIES]


def determined_answers(seed: int, chats: int) -> list[tuple[str, str]]:
    """Returns prompts of conversations with tools, and the only correct answer to each."""
    rng = random.Random(seed)
    found = []
    for messages, definitions in (tool_chat(rng) for _ in range(chats)):
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and not message["content"].startswith(stories.BEGINNING):
                prompt = render(messages[:number], definitions, thinks="reasoning_content" in message)
                found.append((prompt, render(messages[: number + 1], definitions).removeprefix(prompt)))
    return found


def documents(seed: int) -> Iterator[str]:
    """Yields training documents endlessly; deterministic for a seed."""
    rng = random.Random(seed)
    while True:
        kind = rng.random()
        if kind < 0.38:
            yield str(_plain_chat(rng))
        elif kind < 0.78:
            yield str(tool_chat(rng))
        elif kind < 0.90:
            yield BOS + stories.story(rng) + END
        elif kind < 0.95:
            sums = [_sum_turn(rng)[1] for _ in range(rng.randint(1, 8))]
            yield BOS + " ".join(sums) + END
        else:
            known = [answer for country in rng.sample(COUNTRIES, 3) for _, answer in facts(country)]
            yield BOS + " ".join(rng.sample(known, 5)) + END
