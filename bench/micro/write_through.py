"""Measures, in a bare engine, the cost of copying each block when it is complete.

Run: .venv/bin/python -m bench.micro.write_through [--model FILE.gguf] [--pairs 9]

Eight sequences decode. Windows of 16 steps, in which each completes a block, alternate between copying and not copying.
The order within a pair alternates too, because steps become slower as the sequences grow."""

import time
from array import array
from pathlib import Path

from bench import flags
from bench.models import benchmark_model
from bench.paired import quartiles
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf.runner import load
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import Sequence

_STREAMS = 8
_STEPS = 16


def measure(model: Path, pairs: int) -> None:
    runner = load(EngineSettings(model=str(model), threads=1, context_length=1_024, kv_tokens=8_192), lambda _: None)
    copies, config = runner.copies, runner.config
    assert copies is not None
    copies.open()
    pool = BlockPool(
        config.total_kv_blocks,
        config.kv_block_size,
        runner.num_lanes,
        host_blocks=config.host_kv_blocks,
        writes_through=True,
    )
    scheduler = Scheduler(pool, 16, max_step_tokens=1_024, max_cached_blocks=16, expected_tokens=100)
    sampling = engine_request.Sampling(max_tokens=900, ignore_eos=True)
    for number in range(_STREAMS):
        prompt = array("I", [100 + number] * 16)
        runner.add_sequence(number, sampling)
        scheduler.add(Sequence(number, prompt, sampling, frozenset(), domain=Domain(), arrived_at=float(number)))

    def window(transfer_blocks: int) -> tuple[float, float, int]:
        """Returns the seconds of some steps, the part of them spent on copies, and the number of copies."""
        began, copying_s, count = time.perf_counter(), 0.0, 0
        for _ in range(_STEPS):
            plan = scheduler.schedule(200, transfer_blocks)
            at = time.perf_counter()
            runner.apply(plan.kv_ops)
            copies.seal(plan.labels)
            copying_s += time.perf_counter() - at
            count += len(plan.labels)
            scheduler.update(plan, runner.step(plan))
        return time.perf_counter() - began, copying_s, count

    window(16)
    ratios, copying_s, seconds, count = [], 0.0, 0.0, 0
    for pair in range(pairs):
        order = (0, 16) if pair % 2 else (16, 0)
        seen = {blocks: window(blocks) for blocks in order}
        pool.cache._unsaved.clear()  # a window with copies catches up on at most one without
        ratios.append(seen[16][0] / seen[0][0])
        seconds, copying_s, count = seconds + seen[16][0], copying_s + seen[16][1], count + seen[16][2]
    print(f"{model.name}, {_STREAMS} streams, {pairs} pairs of {_STEPS} steps")
    print(f"  time with copies, compared with none   {quartiles(ratios)}")
    print(f"  {count} copies of {1e3 * copying_s / max(1, count):.2f} ms each: {copying_s / seconds:.2%} of the time")


def main() -> None:
    parser = flags.model_parser(__doc__, pairs=8)
    options = parser.parse_args()
    with benchmark_model.model(options.model) as model:
        measure(model, options.pairs)


if __name__ == "__main__":
    main()
