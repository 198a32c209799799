"""Measures the cost of requests that use far fewer tokens than their limit, and of requests that use all of it.

Run: .venv/bin/python -m bench.serving.large_limits [--clients 16] [--limit 4096] [--kv-tokens 16384]

First, answers that end by themselves after 50 to 150 tokens: two workers take turns, one with requests whose
`max_tokens` is 200 and one with the large limit. Then answers that use the whole limit, on new workers in every round:
one has yet to learn what to expect, the other expects everything (`--expected-tokens` above every limit), so that
nothing is ever preempted."""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from bench import flags, system
from bench.paired import quartiles
from tokenbus.client import Client
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.wire import messages

_SMALL_LIMIT = 200
_LENGTHS = range(50, 151)
_PROMPT_TOKENS = 32
_END = 5
"""The token with which answers end: forbidden until then, and all but certain from then on."""
_WHOLE = 1_000_000
_serials = itertools.count()


class Answer(NamedTuple):
    sent_at: float
    token_times: list[float]

    @property
    def first_s(self) -> float:
        return self.token_times[0] - self.sent_at

    @property
    def longest_gap_s(self) -> float:
        return max(later - earlier for earlier, later in itertools.pairwise(self.token_times))


async def ask(client: Client, max_tokens: int, length: int | None) -> Answer:
    """Reads one answer of `length` tokens and an end, or of `max_tokens`."""
    rng = random.Random(next(_serials))
    prompt = [rng.randrange(10, 400) for _ in range(_PROMPT_TOKENS)]
    request = messages.GenerateRequest(token_ids=prompt, max_tokens=max_tokens, temperature=1.0, ignore_eos=True)
    if length is not None:
        request = messages.GenerateRequest(
            token_ids=prompt,
            max_tokens=max_tokens,
            temperature=1.0,
            ignore_eos=True,
            min_tokens=length,
            stop_token_ids=[_END],
            logit_bias={str(_END): 100.0},
        )
    sent_at, times = time.perf_counter(), []
    async for chunk in client.generate("m", request):
        if chunk.error:
            raise SystemExit(f"the system refused: {chunk.error.message}")
        times += [time.perf_counter()] * chunk.tokens
    assert len(times) == max_tokens if length is None else abs(len(times) - length) <= 1, (len(times), length)
    return Answer(sent_at, times)


async def of_clients(client: Client, clients: int, requests: int, max_tokens: int) -> tuple[float, float]:
    """Returns tokens per second of clients that send one request after the other, and the median first token."""
    rng = random.Random(clients)
    lengths = [[rng.choice(_LENGTHS) for _ in range(requests)] for _ in range(clients)]

    async def live(own: list[int]) -> list[Answer]:
        return [await ask(client, max_tokens, length) for length in own]

    began = time.perf_counter()
    answers = [answer for lived in await asyncio.gather(*map(live, lengths)) for answer in lived]
    wall_s = time.perf_counter() - began
    tokens = sum(len(answer.token_times) for answer in answers)
    return tokens / wall_s, statistics.median(answer.first_s for answer in answers)


class Full(NamedTuple):
    """Answers that use their whole limit."""

    tokens_per_s: float
    first_s: float
    """The median."""
    longest_gap_s: float
    cpu_ms_per_token: float
    """CPU time of the engine."""


async def in_full(client: Client, clients: int, limit: int) -> Full:
    engine = (await system.card(client)).pids.engine
    began, cpu_began = time.perf_counter(), system.cpu_seconds(engine)
    answers = await asyncio.gather(*(ask(client, limit, None) for _ in range(clients)))
    wall_s, cpu_s = time.perf_counter() - began, system.cpu_seconds(engine) - cpu_began
    first_s = statistics.median(answer.first_s for answer in answers)
    tokens, longest_gap_s = clients * limit, max(answer.longest_gap_s for answer in answers)
    return Full(tokens / wall_s, first_s, longest_gap_s, 1e3 * cpu_s / tokens)


async def measure_short(model: Path, worker_flags: tuple[str, ...], options: argparse.Namespace) -> None:
    """Compares the large limit with the small one when all answers are short."""
    clients, limit = options.clients, options.limit
    async with system.running(model, *worker_flags) as small, system.running(model, *worker_flags) as large:
        sides = ((small, _SMALL_LIMIT), (large, limit))
        for client, most in sides:
            await of_clients(client, clients, 1, most)
        seen = []
        for number in range(options.pairs):
            found = {}
            for client, most in sides if number % 2 else sides[::-1]:
                found[most] = await of_clients(client, clients, options.requests, most)
            first, second = found[_SMALL_LIMIT], found[limit]
            seen.append((first, second))
            print(f"  round {number + 1}: {first[0]:.0f}, {second[0]:.0f} tokens/s, ", end="")
            print(f"first tokens after {1e3 * first[1]:.1f}, {1e3 * second[1]:.1f} ms", flush=True)
        print(f"{model.name}, {clients} clients, answers of 50 to 150 tokens, {options.pairs} interleaved pairs")
        print(f"  tokens/s, max_tokens {limit} / {_SMALL_LIMIT}      {quartiles([b[0] / a[0] for a, b in seen])}")
        print(f"  first token, max_tokens {limit} / {_SMALL_LIMIT}   {quartiles([b[1] / a[1] for a, b in seen])}")
        print(f"  {(await system.card(large)).load}")


async def measure_full(model: Path, worker_flags: tuple[str, ...], options: argparse.Namespace) -> None:
    """Compares learning with reserving everything when all answers use the whole limit.

    Each round has new workers, so that one always has yet to learn; with `--known` it is asked once before."""
    clients, limit = options.clients, options.limit
    sides = {"whole": (*worker_flags, "--expected-tokens", str(_WHOLE)), "learned": worker_flags}
    shares, cpu_shares = [], []
    for number in range(options.full_pairs):
        found: dict[str, Full] = {}
        for name in sorted(sides, reverse=number % 2 == 0):
            async with system.running(model, *sides[name]) as client:
                if options.known:
                    await in_full(client, 1, limit)
                one = found[name] = await in_full(client, clients, limit)
            print(f"  round {number + 1}, {name}: {one.tokens_per_s:.0f} tokens/s, ", end="")
            print(f"{one.cpu_ms_per_token:.2f} ms of the engine's CPU a token, ", end="")
            print(f"median first token {one.first_s:.2f} s, longest gap {one.longest_gap_s:.2f} s", flush=True)
        shares.append(found["learned"].tokens_per_s / found["whole"].tokens_per_s)
        cpu_shares.append(found["learned"].cpu_ms_per_token / found["whole"].cpu_ms_per_token)
    print(f"{model.name}, {clients} clients that use all of max_tokens {limit}, {options.full_pairs} interleaved pairs")
    print(f"  tokens/s, learned / whole   {quartiles(shares)}")
    print(f"  CPU time, learned / whole   {quartiles(cpu_shares)}")


async def measure(model: Path, worker_flags: tuple[str, ...], options: argparse.Namespace) -> None:
    if options.pairs:
        await measure_short(model, worker_flags, options)
    if options.full_pairs:
        await measure_full(model, worker_flags, options)


def main() -> None:
    parser = flags.parser(__doc__, clients=16, requests=4, limit=4_096, kv_tokens=16_384, pairs=7, full_pairs=3)
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--known", action="store_true", help="a worker has seen one such answer before it is measured")
    options = parser.parse_args()
    sizes = ("--context-length", str(options.limit + 256), "--kv-tokens", str(options.kv_tokens))
    worker_flags = ("--threads", "1", *sizes)
    asyncio.run(measure(options.model, worker_flags, options))


if __name__ == "__main__":
    main()
