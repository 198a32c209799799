"""Measures what requests of 20,000 to 200,000 tokens cost in each process, and how long a neighbour's stream waits.

Run: .venv/bin/python -m bench.router.large_requests [--rounds 5] [--payload 1MB]

The first table has the CPU time of single steps in this process, on the demo model's tokenizer and template: the median
of some rounds. The second one has a real broker and router and two simulated workers: a client sends such requests one
after another, and one of 8 MB with few tokens, while a neighbour's stream of about 300 tokens a second runs: at the
other worker, over the same connection or one of its own, or at the same worker. It shows each process's CPU time for
one request, and the gaps between the neighbour's tokens, next to those without any request."""

import argparse
import asyncio
import functools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.system import card, cpu_seconds, start
from tokenbus.cli.console import nats_server
from tokenbus.client import Client, Stream
from tokenbus.demo import ONNX_PATH
from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.wire import block_hash, codec, internal, messages, params
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import make_policies
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.onnx.tokenizer.onnx_tokenizer import OnnxTokenizer
from tokenbus.worker.engine.process import ipc

SIZES = (20_000, 100_000, 200_000)
_STORY = "Once upon a time there was a fox who lived by the river. 12 + 30 = 42. "
_BLOCK = 16
_WORKERS = 8
_NEIGHBOUR_TOKENS = 100_000
"""More tokens than arrive during a measurement."""
_WORKER = ("--engine", "sim", "--sim-speedup", "10", "--context-length", "262144", "--kv-tokens", "600000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--payload", default="1MB", help="the broker's max_payload (%(default)s)")
    parser.add_argument("--only", choices=("steps", "system"))
    options = parser.parse_args()
    if options.only != "system":
        show_steps(options.rounds)
    if options.only != "steps":
        asyncio.run(show_system(options.rounds, options.payload))


def show_steps(rounds: int) -> None:
    columns = [dict(_steps(size, rounds)) for size in SIZES]
    print("| CPU ms | " + " | ".join(f"{size:,} tokens" for size in SIZES) + " |")
    print("|---|" + "---|" * len(SIZES))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{column[name]:.2f}" for column in columns) + " |")


def _cpu_ms(work: Callable[[], object], rounds: int) -> float:
    spent = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        spent.append((time.process_time() - began) * 1e3)
    return statistics.median(spent)


def _steps(size: int, rounds: int) -> Iterator[tuple[str, float]]:
    """Yields the CPU time of each step of a request's way, in order."""
    files = {path.name: path for path in ONNX_PATH.iterdir() if path.is_file()}
    builder = prompt.load_builder(tokenizer_bundle.unpack(OnnxTokenizer(files, None, "demo").bundle))
    text = _STORY * (1 + size // len(builder.from_text(_STORY, None)))
    token_ids = builder.from_text(text, None)[:size]
    requests = codec.Decoder(messages.GenerateRequest)
    chat = [messages.ChatMessage(role="user", content=text[:2_000]) for _ in range(len(text) // 2_000)]
    as_ids = codec.encode(messages.GenerateRequest(token_ids=token_ids), codec.Encoding.JSON)
    as_packed = codec.encode(messages.GenerateRequest(token_ids=token_ids), codec.Encoding.MSGPACK)
    as_text = codec.encode(messages.GenerateRequest(prompt=text), codec.Encoding.JSON)
    as_chat = codec.encode(messages.GenerateRequest(messages=chat), codec.Encoding.JSON)
    lenient = as_ids[:-1] + b', "seed": 1.0}'
    for name, body, encoding in (
        ("parse token ids, JSON", as_ids, codec.Encoding.JSON),
        ("parse token ids, MessagePack", as_packed, codec.Encoding.MSGPACK),
        ("parse token ids beside an integral float", lenient, codec.Encoding.JSON),
        ("parse a text", as_text, codec.Encoding.JSON),
        ("parse a conversation", as_chat, codec.Encoding.JSON),
    ):
        yield name, _cpu_ms(lambda body=body, encoding=encoding: requests.decode(body, encoding), rounds)  # type: ignore[misc]
    request = requests.decode(as_ids, codec.Encoding.JSON)
    yield "validate", _cpu_ms(lambda: validation.check_request(codec.replace(request, id="r")), rounds)
    yield "tokenize", _cpu_ms(lambda: builder.from_text(text, None), rounds)
    yield (
        "render and tokenize a conversation (without the renderer)",
        _cpu_ms(lambda: builder.from_messages(chat, None, None, None), rounds),
    )
    packed = block_hash.pack_token_ids(token_ids)
    yield "pack", _cpu_ms(lambda: block_hash.pack_token_ids(token_ids), rounds)
    yield "hash", _cpu_ms(lambda: block_hash.block_hashes_of_bytes(packed, _BLOCK, 1), rounds)
    hashes = block_hash.block_hashes_of_bytes(packed, _BLOCK, 1)
    yield from _placement(hashes, size, rounds)
    run = internal.Run(
        request_id="default:r",
        attempt=1,
        epoch="1-a",
        router_id="router",
        reply="_INBOX.a.b",
        encoding=codec.Encoding.JSON,
        token_ids=packed,
        params=params.GenerationParams(max_tokens=1),
    )
    runs, sent = codec.Decoder(internal.Run), codec.encode(run)
    yield "encode the run", _cpu_ms(lambda: codec.encode(run), rounds)
    yield "decode the run", _cpu_ms(lambda: runs.decode(sent), rounds)
    yield "unpack", _cpu_ms(lambda: block_hash.unpack_token_ids(packed), rounds)
    add = ipc.Add(1, packed, engine_request.Sampling(max_tokens=1), ("default", ""), 0, False, tenant="default")
    yield "encode for the engine", _cpu_ms(lambda: ipc.encode(add), rounds)
    builder.close()


def _placement(hashes: list[int], size: int, rounds: int) -> Iterator[tuple[str, float]]:
    """Yields the time to place a prompt among workers, one of which has all of it cached."""
    fleet = Fleet(0.0)
    for number in range(_WORKERS):
        fleet.apply_card(_card(f"w{number}"), 0.0)
    entry = internal.Events(worker_id="w0", epoch="1-a", seq=0, load=_load(), state=messages.WorkerState.READY)
    stored = [internal.BlockRun(parent=1, hashes=hashes)]
    fleet.apply_events("m", entry, 0.0)
    yield (
        "apply the blocks that a worker stores",
        _cpu_ms(lambda: fleet.apply_events("m", codec.replace(entry, seq=1, stored=stored), 0.0), 1),
    )
    rng, policy = random.Random(1), make_policies()["kv"]
    numbers = iter(range(1_000_000))

    def place() -> None:
        key = f"default:{next(numbers)}"
        fleet.place("m", PlacementRequest(key, size, hashes), policy, rng, 0.0, PlacementOptions())

    yield "place", _cpu_ms(place, rounds)


def _card(worker_id: str) -> messages.Card:
    return messages.Card(
        worker_id=worker_id,
        epoch="1-a",
        model="m",
        source="m.gguf",
        engine="sim",
        engine_version="1",
        context_length=262_144,
        max_num_seqs=64,
        max_num_batched_tokens=2_048,
        hash_scheme="xxh3-64:0",
        features=["generate"],
        state=messages.WorkerState.READY,
        host="here",
        pids=messages.Pids(front=1, engine=2),
        versions={},
        kv_block_size=_BLOCK,
        total_kv_blocks=65_536,
    )


def _load() -> messages.Load:
    return messages.Load(free_blocks=60_000)


async def show_system(rounds: int, payload: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as name:
        folder = Path(name)
        (folder / "nats.conf").write_text(f"max_payload: {payload}\n")
        nats = await nats_server.start(0, folder / "nats.log", folder / "nats.conf")
        router = start(folder / "router.log", "router", "--nats", nats.url)
        flags = ("worker", "--nats", nats.url, "--model", "dynamo", *_WORKER, "--served-name")
        worker, beside = (start(folder / f"{name}.log", *flags, name) for name in ("m", "n"))
        try:
            async with await Client.connect(nats.url) as client, await Client.connect(nats.url) as other:
                engine = (await _card_of(client, "m")).pids.engine
                pids = {"client": os.getpid(), "broker": nats.pid, "router": router.pid}
                pids |= {"worker frontend": worker.pid, "engine": engine}
                costs = " | ".join(f"CPU ms, {one}" for one in pids)
                print(f"\n| {payload} | request | {costs} | s | p99 of gaps, ms | longest |")
                print("|---|---|" + "---|" * (len(pids) + 3))
                for where, model, reader in (
                    ("other worker, two connections", "n", other),
                    ("other worker, one connection", "n", client),
                    ("same worker, two connections", "m", other),
                ):
                    for title, ask in _asks(client):
                        await _show(where, title, ask, Neighbour(reader, model), pids, rounds)
        finally:
            for process in (router, worker, beside):
                process.kill()
            nats.stop()


async def _card_of(client: Client, model: str) -> messages.Card:
    """Waits until every worker is ready, and returns the card of one."""
    while True:
        await card(client)
        ready = {served.model: served.workers for served in (await client.models()).models}
        if len(ready) == 2 and (workers := ready[model]):
            return workers[0]
        await asyncio.sleep(0.1)


def _asks(client: Client) -> Iterator[tuple[str, Callable[[], Stream] | None]]:
    yield "none", None
    token_ids = random.Random(5).choices(range(300, 1_000), k=max(SIZES))
    for size in SIZES:
        request = messages.GenerateRequest(token_ids=token_ids[:size], max_tokens=1, cache_prompt=False)
        yield f"{size:,} tokens", functools.partial(client.generate, "m", request)
    chat = [messages.ChatMessage(role="user", content="x")]
    padding = {"padding": "x" * 8_000_000}
    padded = messages.GenerateRequest(messages=chat, chat_template_kwargs=padding, max_tokens=1)
    yield "8 MB", functools.partial(client.generate, "m", padded)


class Neighbour:
    """A stream with a reader, and the longest time in which nothing arrived."""

    def __init__(self, client: Client, model: str) -> None:
        self.gaps: list[float] = []
        self._stream = client.generate(model, prompt="x", max_tokens=_NEIGHBOUR_TOKENS, ignore_eos=True)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        before = None
        async for chunk in self._stream:
            if chunk.tokens:
                now = time.perf_counter()
                if before is not None:
                    self.gaps.append(now - before)
                before = now

    async def close(self) -> None:
        await self._stream.aclose()
        await self._task


async def _show(
    where: str,
    title: str,
    ask: Callable[[], Stream] | None,
    neighbour: Neighbour,
    pids: dict[str, int],
    rounds: int,
) -> None:
    await asyncio.sleep(0.5)
    neighbour.gaps.clear()
    before, began = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.perf_counter()
    if ask is None:
        await asyncio.sleep(rounds)
    else:
        for _ in range(rounds):
            async for _ in ask():
                pass
    spent_s = time.perf_counter() - began
    cpu = [(cpu_seconds(pid) - before[name]) / rounds * 1e3 for name, pid in pids.items()]
    await neighbour.close()
    gaps_ms = sorted(gap * 1e3 for gap in neighbour.gaps)
    cells = [f"{one:.0f}" for one in cpu] + [f"{spent_s / rounds:.2f}"]
    cells += [f"{gaps_ms[len(gaps_ms) * 99 // 100]:.0f}", f"{gaps_ms[-1]:.0f}"]
    print(f"| {where} | {title} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
