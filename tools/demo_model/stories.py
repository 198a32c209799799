"""Tiny stories about two friends and something that one of them found."""

import random

BEGINNING = "Once upon a time"
_NAMES = ("Mia", "Tom", "Ana", "Leo", "Ruby", "Max", "Nora", "Ben", "Ivy", "Sam")
ANIMALS = ("fox", "owl", "rabbit", "bear", "cat", "dog", "duck", "mouse")
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


def story(rng: random.Random, animal: str | None = None) -> str:
    """Returns a tiny story of four to seven sentences about two friends."""
    name, friend = rng.sample(_NAMES, 2)
    animal = animal or rng.choice(ANIMALS)
    adjective, place = rng.choice(_ADJECTIVES), rng.choice(_PLACES)
    thing, feeling, lesson = rng.choice(_THINGS), rng.choice(_FEELINGS), rng.choice(_LESSONS)
    found = thing.split(" ", 1)[1]
    lines = [f"{BEGINNING} there was a {adjective} {animal} named {name} who lived {place}."]
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


def request(rng: random.Random, animal: str) -> str:
    """Returns one of the ways to ask for a story about an animal."""
    return rng.choice(
        (f"Tell me a story about a {animal}.", f"Tell me a story about {animal}s.", f"Write a story about a {animal}.")
    )
