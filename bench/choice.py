"""How long does a router take to choose: token ids in, worker out (hash, match, cost, book)?

Run: .venv/bin/python -m bench.choice [--workers 64 1000] [--blocks 260000] [--tokens 1024 8192]

Every worker holds conversations of 64 to 512 blocks until all together hold `--blocks`; each choice is for a prompt
that goes on with one of them. CPU time of this process, in microseconds."""

import argparse
import gc
import random
import statistics
import time

from protocol import blocks, internal, messages
from router.fleet import Fleet
from router.placement import Kv
from router.served import Placement, Prompt, Wish

_BLOCK = 16
_ANYONE = Wish()


def _card(number: int, held_blocks: int) -> messages.Card:
    return messages.Card(
        worker_id=f"w{number}",
        epoch="1-a",
        model="m",
        source="m",
        engine="sim",
        engine_version="1",
        context_length=131_072,
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
        hash_scheme="xxh3-64:f",
        features=["generate"],
        state=messages.WorkerState.READY,
        host="h",
        pids=messages.Pids(front=1, engine=2),
        versions={},
        kv_block_size=_BLOCK,
        total_kv_blocks=held_blocks,
    )


class Bed:
    """A fleet whose workers are full, and prompts that go on with what they hold."""

    def __init__(self, workers: int, num_blocks: int, rng: random.Random) -> None:
        self.fleet = Fleet(began_at=0.0)
        self.rng = rng
        self.told: list[bytes] = []
        self.parent = blocks.root_hash(blocks.PrefixDomain("f", tenant="default"))
        each = num_blocks // workers
        for number in range(workers):
            self.fleet.take_card(_card(number, 2 * each + 1_024), 0.0)
            self._fill(number, each)

    def _fill(self, number: int, each: int) -> None:
        runs, held = [], 0
        while held < each:
            length = min(self.rng.randrange(64, 513), each - held)
            data = self.rng.randbytes(4 * _BLOCK * length)
            self.told.append(data)
            runs.append(internal.BlockRun(parent=self.parent, hashes=blocks.hashes_of(data, _BLOCK, self.parent)))
            held += length
        load = messages.Load(running=self.rng.randrange(8), used_blocks=self.rng.randrange(each))
        said = internal.Events(
            worker_id=f"w{number}", epoch="1-a", seq=0, load=load, state=messages.WorkerState.READY, stored=runs
        )
        self.fleet.take_events(said, 0.0)

    def prompts(self, tokens: int, count: int) -> list[bytes]:
        """Each goes on with a conversation that some worker holds."""
        found = []
        for _ in range(count):
            begun = self.rng.choice(self.told)[: 4 * tokens // 2]
            found.append(begun + self.rng.randbytes(4 * tokens - len(begun)))
        return found

    def choose(self, number: int, data: bytes, policy: Kv) -> None:
        """What a router does for each request, but the sending."""
        scheme = self.fleet.scheme_of("m")
        assert scheme is not None
        domain = blocks.PrefixDomain(scheme.fingerprint, tenant="default")
        hashes = blocks.hashes_of(data, scheme.block_size, blocks.root_hash(domain))
        prompt = Prompt(f"r{number}", len(data) // 4, hashes)
        placement = self.fleet.place("m", prompt, policy, self.rng, 0.5, _ANYONE)
        assert isinstance(placement, Placement)
        self.fleet.unbook(placement.worker.card.worker_id, prompt.key)


def measure(workers: int, num_blocks: int, tokens: int, count: int) -> list[float]:
    """Microseconds of each choice, sorted."""
    bed = Bed(workers, num_blocks, random.Random(1))
    policy = Kv()
    gc.collect()
    gc.freeze()
    taken = []
    for number, data in enumerate(bed.prompts(tokens, count)):
        began = time.process_time_ns()
        bed.choose(number, data, policy)
        taken.append((time.process_time_ns() - began) / 1e3)
    return sorted(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1_000])
    parser.add_argument("--blocks", type=int, default=260_000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_024, 8_192])
    parser.add_argument("--count", type=int, default=2_000)
    options = parser.parse_args()
    for workers in options.workers:
        for tokens in options.tokens:
            taken = measure(workers, options.blocks, tokens, options.count)
            p99 = taken[int(0.99 * len(taken))]
            print(f"{workers} workers, {tokens} tokens: median {statistics.median(taken):.0f} µs, p99 {p99:.0f} µs")


if __name__ == "__main__":
    main()
