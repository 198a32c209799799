"""The text that the demo model learns: tiny stories, small sums, and facts about an invented world."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from tokenbus.demo import CORRECT_SUMS_UP_TO

BOS, END, SYSTEM, USER, ASSISTANT = "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, END, SYSTEM, USER, ASSISTANT)

# The `qwen2` pre-tokenizer of llama.cpp splits numbers into digits, so that the model can add column by column.
PRE_TOKENIZER = "qwen2"
PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the demo model knows the roles system, user and assistant, not ' ~ message.role) }}"
    "{% endif %}"
    "{{ '<|' ~ message.role ~ '|>' ~ message.content | trim ~ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


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

_STORY_NAMES = ("Mia", "Tom", "Ana", "Leo", "Ruby", "Max", "Nora", "Ben", "Ivy", "Sam")
_ANIMALS = ("fox", "owl", "rabbit", "bear", "cat", "dog", "duck", "mouse")
_ADJECTIVES = ("little", "brave", "kind", "sleepy", "happy", "curious")
_PLACES = ("in the forest", "by the river", "near the sea", "on a green hill", "in a quiet village")
_THINGS = ("a red ball", "a shiny key", "an old map", "a warm hat", "a blue kite", "a round stone")
_FEELINGS = ("happy", "proud", "glad", "full of joy")
_LESSONS = (
    "it is good to share",
    "friends help each other",
    "small steps go far",
    "it is fine to ask for help",
)


def sum_question(left: int, right: int) -> str:
    """Returns the wording of a sum on which the model is tested."""
    return f"What is {left} + {right}?"


def sum_answer(left: int, right: int) -> str:
    """Returns the only right answer to `sum_question`."""
    return f"{left} + {right} = {left + right}."


def facts(country: Country) -> list[tuple[str, str]]:
    """Returns questions and answers about everything there is to know about a country."""
    name, capital, animal, river, color = country
    return [
        (f"What is the capital of {name}?", f"The capital of {name} is {capital}."),
        (f"Which country has the capital {capital}?", f"{capital} is the capital of {name}."),
        (f"Which animal lives in {name}?", f"The animal of {name} is the {animal}."),
        (f"Which river flows through {name}?", f"The river {river} flows through {name}."),
        (f"What color is the flag of {name}?", f"The flag of {name} is {color}."),
    ]


def story(rng: random.Random, animal: str | None = None) -> str:
    """Returns a tiny story of four to seven sentences about two friends."""
    name, friend = rng.sample(_STORY_NAMES, 2)
    animal = animal or rng.choice(_ANIMALS)
    adjective, place = rng.choice(_ADJECTIVES), rng.choice(_PLACES)
    thing, feeling, lesson = rng.choice(_THINGS), rng.choice(_FEELINGS), rng.choice(_LESSONS)
    found = thing.split(" ", 1)[1]
    lines = [f"Once upon a time there was a {adjective} {animal} named {name} who lived {place}."]
    lines.append(
        rng.choice(
            (
                f"One day {name} found {thing}.",
                f"One morning {name} saw {thing} and stopped.",
                f"One day {name} went for a walk and found {thing}.",
            )
        )
    )
    if rng.random() < 0.6:
        lines.append(f'"What a nice {found.split(" ", 1)[1]}!" said {name}.')
    lines.append(
        rng.choice(
            (
                f"{name} wanted to show it to {friend}.",
                f"{name} took it home and called {friend}.",
                f"Then {friend} came by and asked to play.",
            )
        )
    )
    if rng.random() < 0.5:
        lines.append(f"They played with the {found} until the sun went down.")
    if rng.random() < 0.5:
        lines.append(f"At night {friend} gave {name} a big hug.")
    lines.append(f"{name} and {friend} were {feeling} and learned that {lesson}.")
    return " ".join(lines)


def story_request(rng: random.Random, animal: str) -> str:
    """Returns one of the ways to ask for a story about an animal."""
    return rng.choice(
        (f"Tell me a story about a {animal}.", f"Tell me a story about {animal}s.", f"Write a story about a {animal}.")
    )


def chat(turns: list[tuple[str, str]]) -> str:
    """Returns a conversation as the chat template renders it, with an end token after every answer."""
    return BOS + "".join(f"{USER}{question}{END}{ASSISTANT}{answer}{END}" for question, answer in turns)


def _sum_turn(rng: random.Random) -> tuple[str, str]:
    left, right = rng.randrange(CORRECT_SUMS_UP_TO), rng.randrange(CORRECT_SUMS_UP_TO)
    question = rng.choices((sum_question(left, right), f"{left} + {right}", f"{left} + {right} = ?"), (4, 1, 1))[0]
    return question, sum_answer(left, right)


def _greeting_turn(rng: random.Random) -> tuple[str, str]:
    question = rng.choice(("Hello!", "Hi", "Hello", "Who are you?", "What can you do?"))
    return question, "Hello! I am the demo model. I can tell stories, add small numbers, and I know twelve countries."


def _story_turn(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.3:
        return rng.choice(("Tell me a story.", "Tell me a short story.", "Write a story.")), story(rng)
    animal = rng.choice(_ANIMALS)
    return story_request(rng, animal), story(rng, animal)


def _turn(rng: random.Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.58:
        return _sum_turn(rng)
    if kind < 0.84:
        return rng.choice(facts(rng.choice(COUNTRIES)))
    return _greeting_turn(rng) if kind < 0.88 else _story_turn(rng)


def documents(seed: int) -> Iterator[str]:
    """Yields training documents without end, the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        kind = rng.random()
        if kind < 0.72:
            system = f"{SYSTEM}You are a helpful assistant.{END}" if rng.random() < 0.1 else ""
            text = chat([_turn(rng) for _ in range(rng.randint(1, 6))])
            yield BOS + system + text.removeprefix(BOS)
        elif kind < 0.87:
            yield BOS + story(rng) + END
        elif kind < 0.94:
            sums = [_sum_turn(rng)[1] for _ in range(rng.randint(1, 8))]
            yield BOS + " ".join(sums) + END
        else:
            known = [answer for country in rng.sample(COUNTRIES, 3) for _, answer in facts(country)]
            yield BOS + " ".join(rng.sample(known, 5)) + END
