"""The suite's recorded outputs as the tokens a worker would have: each with its id and its text.

The tokenizers are not needed. A special token is spelled out in the recorded text, and `tokens.json` has the ids of
those that markers are made of, found by comparing texts with ids. The text between two special tokens is cut into as
many pieces as there are ids; the position of the cuts does not matter to a parser that reads ordinary tokens only as
text.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path

import msgspec
from canitoolcall.fixtures import Family, Fixture, ReferenceModel

from tokenbus.worker.chat_format.known_formats import KNOWN_FORMATS, with_tokens
from tokenbus.worker.chat_format.parsing.markers import Rules
from tokenbus.worker.contract.chat_format import ChatFormat

IDS: dict[str, dict[str, int]] = json.loads(Path(__file__).with_name("tokens.json").read_text())
CHARACTERS_PER_TOKEN = 3.5
FORMATS = {
    "deepseek-v3": "deepseek-v3",
    "deepseek-v31": "deepseek-v3.1",
    "deepseek-v32": "deepseek-v3.2",
    "deepseek-v4": "deepseek-v4",
    "deepseek-v41": "deepseek-v4.1",
    "gemma4": "gemma-4",
    "glm45-newline": "glm-lines",
    "glm47-compact": "glm",
    "glm53-compact": "glm",
    "gpt-oss": "gpt-oss",
    "kimi-k2-instruct": "kimi-k2",
    "kimi-k2-thinking": "kimi-k2",
    "kimi-k3-xtml": "kimi-k3",
    "llama3-json": "llama-3",
    "llama4-pythonic": "llama-4",
    "v3": "mistral-array",
    "v11": "mistral",
    "v13": "mistral",
    "devstral-2507": "mistral",
    "v13-think": "mistral-reasoning",
    "v13plus-think": "mistral-reasoning",
    "v11-think-text": "mistral-reasoning-text",
    "qwen3-hybrid": "hermes",
    "qwen3-thinking-2507": "hermes",
    "qwen3-instruct-2507": "hermes",
    "qwen3-coder": "qwen-tags",
    "qwen3-coder-next": "qwen-tags",
    "qwen3.5": "qwen-tags",
    "qwen3.6": "qwen-tags",
    "qwen3.8": "qwen-tags",
}
"""The known format of each of the suite's variants."""


def format_of(fixture: Fixture, family: Family) -> ChatFormat:
    """Returns the format of the model that wrote a recorded output."""
    name = FORMATS[_reference(fixture, family).variant or ""]
    known = next(one.format for one in KNOWN_FORMATS if one.name == name)
    return with_tokens(known, IDS[_repository(fixture)])


@functools.lru_cache(maxsize=64)
def _rules(encoded: bytes) -> Rules:
    return Rules(msgspec.json.decode(encoded, type=ChatFormat))


def rules_of(fixture: Fixture, family: Family) -> Rules:
    return _rules(msgspec.json.encode(format_of(fixture, family)))


def generation_prompt_of(fixture: Fixture, family: Family) -> str:
    """Returns the prompt's beginning of the answer: as recorded, or the default of the model's template."""
    return fixture.generation_prompt or _reference(fixture, family).default_generation_prompt or ""


def tokens_of(fixture: Fixture) -> list[tuple[int, str]]:
    """Returns a recorded output's tokens, with their texts."""
    ids = {token: text for text, token in IDS[_repository(fixture)].items()}
    runs: list[list[int]] = [[]]
    specials: list[int] = []
    for token in fixture.output_token_ids or ():
        if token in ids:
            specials.append(token)
            runs.append([])
        else:
            runs[-1].append(token)
    texts = _texts_between(fixture.raw_output, [ids[token] for token in specials], [len(run) for run in runs])
    found: list[tuple[int, str]] = []
    for place, (run, text) in enumerate(zip(runs, texts, strict=True)):
        found += zip(run, _cut(text, len(run)), strict=True)
        if place < len(specials):
            found.append((specials[place], ids[specials[place]]))
    return found


def _texts_between(text: str, specials: list[str], lengths: list[int]) -> list[str]:
    """Returns the texts of the runs between special tokens. A text can spell out a special token that is not among
    the ids: of all ways to find the special tokens in it, this takes the one with the likeliest lengths of runs."""
    places = [[found.start() for found in re.finditer(f"(?={re.escape(one)})", text)] for one in specials]
    best: dict[int, tuple[float, list[str]]] = {0: (0.0, [])}
    for one, starts, length in zip(specials, places, lengths, strict=False):
        step: dict[int, tuple[float, list[str]]] = {}
        for behind, (cost, runs) in best.items():
            for at in starts:
                if at >= behind and (extra := _cost(text[behind:at], length)) is not None:
                    end = at + len(one)
                    if end not in step or cost + extra < step[end][0]:
                        step[end] = (cost + extra, [*runs, text[behind:at]])
        best = step
    ends = [
        (cost + extra, [*runs, text[behind:]])
        for behind, (cost, runs) in best.items()
        if (extra := _cost(text[behind:], lengths[-1])) is not None
    ]
    return min(ends)[1]


def _cost(text: str, tokens: int) -> float | None:
    """Returns how unlikely it is that a text has this many tokens, or None if it can't."""
    if bool(text) != bool(tokens) or len(text.encode()) < tokens:
        return None
    return abs(len(text) / CHARACTERS_PER_TOKEN - tokens)


def _cut(text: str, pieces: int) -> list[str]:
    bounds = [len(text) * place // max(pieces, 1) for place in range(pieces + 1)]
    return [text[begin:end] for begin, end in itertools.pairwise(bounds)]


def _repository(fixture: Fixture) -> str:
    assert fixture.tokenizer is not None
    return fixture.tokenizer.repo


def _reference(fixture: Fixture, family: Family) -> ReferenceModel:
    return next(one for one in family.reference_models if one.repo == fixture.models[0])
