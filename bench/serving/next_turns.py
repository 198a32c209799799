"""Counts the prompt tokens that the turns of a conversation compute whose client drops the reasoning, and times others.

Run: .venv/bin/python -m bench.serving.next_turns [--turns 4] [--words 40] [--pairs 9] [--chats 4]

Two systems serve the demo model, one of which leaves idle steps empty. In the first part, which depends on no clock but
that of the tool, each turn is a question that the model thinks about and answers in `--words` words, and the client's
tool takes a second. The result is the tokens computed for the turns after the first, relative to those that neither the
last prompt nor the answer had. In the second part a stream runs while such chats end beside it: its mean gap between
tokens, its 99th percentile, and then the first token of a request that comes while a next turn is computed."""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial

from bench import flags, paired, streams, system
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.wire import messages

_THINKING = {"enable_thinking": True}
_TOOL_S = 1.0
_STREAM_TOKENS = 400
_NEIGHBOUR = tuple(10 + place % 90 for place in range(24))


async def say(client: WireClient, turns: list[messages.ChatMessage], num_words: int) -> messages.Usage:
    """Sends a conversation and appends the model's answer to it, without its reasoning."""
    words = f"([a-z]{{5}} ){{{num_words}}}[.]"
    request = messages.GenerateRequest(chat_template_kwargs=_THINKING, regex=words, max_tokens=1_000, temperature=0)
    return await streams.say(client, request, turns)


async def count(client: WireClient, turns: Sequence[messages.ChatMessage]) -> int:
    """Returns the tokens of a conversation without a generation prompt."""
    arguments = _THINKING | {"add_generation_prompt": False}
    asked = messages.TokenizeRequest(messages=list(turns), chat_template_kwargs=arguments, only_count=True)
    num_tokens = (await client.tokenize("m", asked)).count
    assert isinstance(num_tokens, int), num_tokens
    return num_tokens


def question(rng: random.Random, num_words: int) -> messages.ChatMessage:
    return messages.ChatMessage(role="user", content=" ".join(str(rng.randrange(100)) for _ in range(num_words)))


async def computed(client: WireClient, num_turns: int, num_words: int) -> tuple[int, int]:
    """Returns the prompt tokens of the later turns that were computed, and those that were new."""
    rng = random.Random(1)
    turns = [question(rng, num_words)]
    await say(client, turns, num_words)
    done = new = 0
    for _ in range(num_turns):
        await asyncio.sleep(_TOOL_S)
        known = await count(client, turns)
        turns.append(question(rng, num_words))
        usage = await say(client, turns, num_words)
        done += usage.prompt_tokens - usage.cached_tokens
        new += usage.prompt_tokens - known
    return done, new


async def gaps(client: WireClient, num_chats: int, num_words: int, number: int) -> tuple[float, float]:
    """Returns the mean and the 99th percentile of a stream's gaps in milliseconds, while chats come and end."""
    rng = random.Random(number)
    others = [say(client, [question(rng, num_words)], num_words) for _ in range(num_chats)]
    times, _ = await asyncio.gather(streams.complete(client, _NEIGHBOUR, _STREAM_TOKENS), asyncio.gather(*others))
    found = [1e3 * (second - first) for first, second in itertools.pairwise(times)]
    return statistics.fmean(found), statistics.quantiles(found, n=100)[98]


async def first_token(client: WireClient, num_words: int, number: int) -> float:
    """Returns the milliseconds until the first token of a request that comes right after a chat has ended."""
    rng, found = random.Random(number), []
    for _ in range(8):
        await say(client, [question(rng, num_words)], num_words)
        await asyncio.sleep(rng.random() * 0.05)
        began = time.perf_counter()
        times = await streams.complete(client, [rng.randrange(10, 90) for _ in range(24)], 2)
        found.append(1e3 * (times[0] - began))
    return statistics.fmean(found)


async def measure(num_turns: int, num_words: int, pairs: int, num_chats: int) -> None:
    flag = "--no-speculative-prefill"
    async with (
        system.running(MODEL_PATH, "--threads", "1", flag) as without,
        system.running(MODEL_PATH, "--threads", "1") as with_it,
    ):
        print(f"demo model, {num_turns} turns after the first")
        for name, client in ((flag, without), ("default", with_it)):
            done, new = await computed(client, num_turns, num_words)
            print(f"  {name:<26} {done:6} computed, {new:6} new: {done / new:.3f}")
        print(f"a stream of {_STREAM_TOKENS} tokens while {num_chats} chats end: mean and 99th percentile of its gaps")
        seen = await paired.interleave(
            partial(gaps, without, num_chats, num_words), partial(gaps, with_it, num_chats, num_words), pairs
        )
        paired.show((flag, "default"), "ms", [(one[0], other[0]) for one, other in seen], 3)
        paired.show((flag, "default p99"), "ms", [(one[1], other[1]) for one, other in seen], 3)
        print("the first token of a request within 50 ms after a chat has ended")
        later = await paired.interleave(
            partial(first_token, without, num_words), partial(first_token, with_it, num_words), pairs
        )
        paired.show((flag, "default"), "ms", later, 3)


def main() -> None:
    options = flags.parser(__doc__, turns=4, words=40, pairs=9, chats=4).parse_args()
    asyncio.run(measure(options.turns, options.words, options.pairs, options.chats))


if __name__ == "__main__":
    main()
