"""Counts how much of an agent's session is cached, turn by turn, and compares with llama-server.

Run: LLAMA_CPP_BIN=... .venv/bin/python -m bench.gateway.agent_session [--turns 30] [--tokens 30000] [--workers 2]

An agent asks `/v1/messages`: at each turn it sends everything again, with a system prompt, tools, what the model has
answered (a call, which is required) and the call's result. The first system block is a billing header that is new at
each turn. A third of the prompt is there from the beginning. The result is the share of each turn (its prompt and
answer) that the next turn finds cached, by the numbers that each server reports, with the demo model's shape and random
weights, both with room for the whole session."""

import asyncio
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench import flags, http_client, system
from bench.baselines import llama_server
from tests.support.models import random_model
from tests.support.models.shape import PRESETS

_WORDS = ("the", "fox", "went", "over", "a", "hill", "and", "saw", "some", "blue", "birds", "sing", "at", "night")
_TOKENS_PER_WORD = 1.625
"""With the vocabulary of the random model, whose merges are few."""
_TOOLS = [
    {
        "name": name,
        "description": f"Call {name}.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"enum": ["a.py", "b.py", "c.py"]}, "line": {"enum": [1, 2, 3]}},
            "required": ["path", "line"],
            "additionalProperties": False,
        },
    }
    for name in ("read", "edit", "run")
]


class Turn(NamedTuple):
    """The token counts of one turn."""

    prompt: int
    cached: int
    answered: int
    """Tokens of the answer."""


class Session:
    """An agent's session with one server."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self._messages: list[dict[str, Any]] = []
        self._system = ""
        self.turns: list[Turn | None] = []
        """None if the server sent no counts, as happens occasionally with llama-server."""

    def begin(self, tokens: int) -> None:
        self._system = self._text(tokens)
        self._messages.append({"role": "user", "content": "Mend the bug."})

    async def turn(self, result_tokens: int) -> None:
        """Asks once, and appends the answer and the results of its calls to the conversation."""
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={self._rng.randrange(1 << 32):08x};"
        body = {
            "model": "m",
            "max_tokens": 120,
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": self._system}],
            "messages": self._messages,
            "tools": _TOOLS,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "stream": True,
        }
        blocks: list[dict[str, Any]] = []
        usage: dict[str, int] = {}
        async for event in http_client.events(f"{self._url}/messages", body):
            match event["type"]:
                case "message_start":
                    usage |= event["message"]["usage"]
                case "content_block_start":
                    blocks.append({**event["content_block"], "json": ""})
                case "content_block_delta":
                    delta = event["delta"]
                    blocks[-1]["json"] += delta.get("partial_json", "")
                    if "text" in delta:
                        blocks[-1]["text"] += delta["text"]
                case "message_delta":
                    usage |= {name: count for name, count in event["usage"].items() if count is not None}
                case "error":
                    raise SystemExit(f"{self._url}: {event}")
                case _:
                    pass
        cached = usage.get("cache_read_input_tokens", 0)
        known = "input_tokens" in usage
        self.turns.append(Turn(usage["input_tokens"] + cached, cached, usage["output_tokens"]) if known else None)
        said = [_history(block) for block in blocks if block["type"] in ("text", "tool_use")]
        self._messages.append({"role": "assistant", "content": [block for block in said if block.get("text") != ""]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": self._text(result_tokens)}
            for block in said
            if block["type"] == "tool_use"
        ]
        self._messages.append({"role": "user", "content": results or "Go on."})

    def found(self) -> list[float]:
        """Returns the share of each turn's prompt and answer that the next turn found cached."""
        return [
            min(after.cached / (before.prompt + before.answered), 1.0)
            for before, after in zip(self.turns, self.turns[1:], strict=False)
            if before is not None and after is not None
        ]

    def _text(self, tokens: int) -> str:
        return " ".join(self._rng.choice(_WORDS) for _ in range(int(tokens / _TOKENS_PER_WORD)))


def _history(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    return {"type": "tool_use", "id": block["id"], "name": block["name"], "input": json.loads(block["json"] or "{}")}


async def measure(turns: int, tokens: int, workers: int) -> None:
    context = tokens * 2
    ours = ("--threads", "1", "--kv-tokens", str(context), "--context-length", str(context))
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder:
        model = Path(folder) / "demo-shape.gguf"
        random_model.write(model, PRESETS["demo"]._replace(context=context), "f16", threads=2)
        async with (
            system.started(model, *[ours] * workers) as running,
            system.gateway(running) as (url, _),
            llama_server.running(model, 1, "--jinja", "-np", "1", "-c", str(context)) as server,
        ):
            sessions = {"tokenbus": Session(url, seed=1), "llama-server": Session(server.base_url, seed=1)}
            for session in sessions.values():
                session.begin(tokens // 3)
            for _ in range(turns):
                for session in sessions.values():
                    await session.turn(tokens * 2 // 3 // turns)
    print(f"a model of the demo's shape, {turns} turns, {workers} workers; share of the turn before that is cached")
    for name, session in sessions.items():
        found = session.found()
        last = next(turn for turn in reversed(session.turns) if turn is not None)
        print(
            f"  {name:14s} at least {min(found):.3f}, median {statistics.median(found):.3f}, of {len(found)} turns; "
            f"{last.prompt} tokens in the last prompt, {last.cached} of them cached"
        )


def main() -> None:
    options = flags.parser(__doc__, turns=30, tokens=30_000, workers=2).parse_args()
    asyncio.run(measure(options.turns, options.tokens, options.workers))


if __name__ == "__main__":
    main()
