"""Counts the prompt tokens computed for a conversation if the model's state can't be cut at a token.

Run: .venv/bin/python -m bench.serving.kv.checkpoints [--kind hybrid] [--preset tiny] [--turns 10] [--others 20]

One worker serves a model with random weights (bench/models/random_stateful.py), and twenty other conversations with the
same beginning come between any two turns. The result is an exact count that depends on no clock: the prompt tokens that
the engine computed, relative to those that were new. `--rewritten` leaves the end of each prompt out of the next one,
as templates do that write a finished answer differently from the current one."""

import asyncio
import random
import tempfile
from pathlib import Path

from bench import flags, system
from bench.models import random_stateful
from tokenbus.client import Client
from tokenbus.protocol.wire import messages

_SYSTEM, _USER, _GENERATION_PROMPT, _ANSWER = 200, 40, 4, 60


class Conversation:
    """The tokens of a conversation, and how many of its prompts were new and computed."""

    def __init__(self, client: Client, seed: int, *, rewritten: bool) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self._rewritten = rewritten
        self._tokens = _draw(random.Random(0), _SYSTEM)
        self._num_known = 0
        self.new = self.computed = 0

    async def turn(self) -> None:
        """Sends the conversation with a new question, and appends the answer."""
        history = self._tokens + _draw(self._rng, _USER)
        prompt = [*history, *range(5, 5 + _GENERATION_PROMPT)]
        request = messages.GenerateRequest(
            token_ids=prompt, max_tokens=_ANSWER, temperature=0, ignore_eos=True, return_token_ids=True
        )
        answer: list[int] = []
        async for chunk in self._client.generate("m", request):
            if chunk.error:
                raise SystemExit(f"the system refused: {chunk.error.message}")
            answer += chunk.token_ids or []
            if isinstance(chunk.usage, messages.Usage):
                self.computed += chunk.usage.prompt_tokens - chunk.usage.cached_tokens
        self.new += len(prompt) - self._num_known
        self._tokens = (history if self._rewritten else prompt) + answer
        self._num_known = len(history if self._rewritten else self._tokens)


async def measure(model: Path, name: str, turns: int, others: int, *, rewritten: bool) -> None:
    async with system.running(model, "--threads", "1", "--context-length", "4096") as client:
        one = Conversation(client, 1, rewritten=rewritten)
        for number in range(turns):
            await one.turn()
            for other in range(others):
                await Conversation(client, 2 + other + number * others, rewritten=rewritten).turn()
    print(f"{name}, {turns} turns, {others} other conversations after each")
    print(f"  new prompt tokens        {one.new:6}")
    print(f"  computed prompt tokens   {one.computed:6}   {one.computed / one.new:.3f} of the new ones")


def _draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 300) for _ in range(count)]


def main() -> None:
    parser = flags.parser(__doc__, turns=10, others=20)
    parser.add_argument("--kind", choices=random_stateful.KINDS, default="hybrid")
    parser.add_argument("--preset", choices=random_stateful.PRESETS, default="tiny")
    parser.add_argument("--rewritten", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder:
        model = Path(folder, f"{options.kind}.gguf")
        shape = random_stateful.PRESETS[options.preset]
        random_stateful.write(model, options.kind, shape, quantized=options.preset != "tiny")
        name = f"{options.kind} model, {options.preset}"
        asyncio.run(measure(model, name, options.turns, options.others, rewritten=options.rewritten))


if __name__ == "__main__":
    main()
