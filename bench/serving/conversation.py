"""Counts the prompt tokens that a returning conversation computes, with twenty others between any two turns.

Run: .venv/bin/python -m bench.serving.conversation [--turns 10] [--others 20]

The demo model runs in one worker. The result is an exact count that depends on no clock: the tokens the engine computed
for the conversation's prompts, relative to those that were new in them."""

import asyncio
import random

from bench import flags, streams, system
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.wire import messages

_ASKED = messages.GenerateRequest(max_tokens=24, temperature=0)
_WORDS = ("the", "fox", "went", "over", "a", "hill", "and", "saw", "some", "blue", "birds", "sing", "at", "night")


async def measure(num_turns: int, num_others: int) -> None:
    rng = random.Random(1)

    def words(count: int) -> messages.ChatMessage:
        return messages.ChatMessage(role="user", content=" ".join(rng.choice(_WORDS) for _ in range(count)))

    async with system.running(MODEL_PATH, "--threads", "1") as client:
        turns: list[messages.ChatMessage] = []
        computed = new = before = 0
        for _ in range(num_turns):
            turns.append(words(20))
            usage = await streams.say(client, _ASKED, turns)
            computed += usage.prompt_tokens - usage.cached_tokens
            new += usage.prompt_tokens - before
            before = usage.total_tokens
            for _ in range(num_others):
                await streams.say(client, _ASKED, [words(60)])
    print(f"demo model, {num_turns} turns, {num_others} other conversations after each")
    print(f"  new prompt tokens        {new:6}")
    print(f"  computed prompt tokens   {computed:6}   {computed / new:.3f} of the new ones")


def main() -> None:
    options = flags.parser(__doc__, turns=10, others=20).parse_args()
    asyncio.run(measure(options.turns, options.others))


if __name__ == "__main__":
    main()
