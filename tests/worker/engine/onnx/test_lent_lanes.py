"""Two ONNX models lend each other lanes: answers stay the same, and empty lanes take no memory."""

import ctypes
import mmap
import sys
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.engines import ONNX, gqa_demo
from tokenbus import demo
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.onnx.dynamic_cache import DynamicCache
from tokenbus.worker.engine.onnx.graph import KvTensor
from tokenbus.worker.engine.onnx.runner import OnnxRunner, load
from tokenbus.worker.engine.onnx.static_cache import HostRows, StaticCache
from tokenbus.worker.engine.process.device_sharing import KvPool
from tokenbus.worker.engine.scheduling.scheduler import Scheduler
from tokenbus.worker.engine.scheduling.sequence import Sequence

FOLDERS: Mapping[str, Callable[[], Path]] = {"plain": lambda: demo.ONNX_PATH, "gqa": gqa_demo}
LANES = 6
CONTEXT = 256
KV = KvTensor("past", "present", 4, 64, np.dtype(np.float32))


def resident_bytes(memory: np.ndarray[Any, Any]) -> int:
    """Returns how much of an array's memory the system has really given."""
    start = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(memory.ctypes.data + memory.nbytes - start) // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * count)()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * mmap.PAGESIZE), pages)
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the pages")
def test_a_released_row_takes_no_memory_and_its_neighbours_keep_theirs() -> None:
    rows = HostRows(KV, num_rows=3, row_tokens=1_001)  # rows begin and end within pages
    rows.array[:] = 1
    before = resident_bytes(rows.array)
    rows.release(1)
    row_bytes = rows.array.strides[0]
    assert before - resident_bytes(rows.array) in range(row_bytes - 2 * mmap.PAGESIZE, row_bytes + 1)
    assert (rows.array[[0, 2]] == 1).all()
    rows.array[1] = 2
    assert (rows.array[[0, 2]] == 1).all()


def pooled(model: Path, **fields: Any) -> EngineSettings:
    probe = msgspec.structs.replace(ONNX, model=str(model), context_length=CONTEXT, max_num_seqs=LANES, kv_pool_bytes=1)
    try:
        load(probe, lambda share: None, LoadedModels())
    except ModelError as error:  # says what a context takes
        row_bytes = int(str(error).partition("which takes ")[2].split()[0])
    return msgspec.structs.replace(probe, kv_pool_bytes=LANES * row_bytes, **fields)


class Lender:
    """A model whose steps are made by hand."""

    def __init__(self, settings: EngineSettings, pool: KvPool) -> None:
        runner = load(settings, lambda share: None, LoadedModels())
        assert isinstance(runner, OnnxRunner)
        self.runner = runner
        assert runner.copies is not None
        runner.copies.open(None)
        config = runner.config
        blocks = BlockPool(
            config.total_kv_blocks,
            config.kv_block_size,
            runner.num_lanes,
            fingerprint=config.fingerprint,
            host_blocks=config.host_kv_blocks,
            writes_through=True,
        )
        share = pool.join(settings, config, runner, lambda: None)
        self.scheduler = Scheduler(blocks, config.max_num_seqs, max_step_tokens=256, lane_share=share)
        self.sequences: list[Sequence] = []

    def add(self, first: int, max_tokens: int) -> None:
        number = len(self.sequences) + 1
        tokens = array("I", [(first + place) % 500 + 20 for place in range(40)])
        sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
        self.sequences.append(Sequence(number, tokens, sampling, frozenset(), arrived_at=float(number)))
        self.scheduler.add(self.sequences[-1])

    def step(self) -> None:
        assert self.scheduler.borrowed_lanes is not None
        plan = self.scheduler.schedule(256, 100)
        for sequence in plan.started:
            self.runner.add_sequence(sequence.seq_no, sequence.sampling)
        self.runner.apply(plan.kv_ops)
        self.scheduler.borrowed_lanes.give_back()
        if plan.scheduled:
            self.scheduler.update(plan, self.runner.step(plan))
        self.scheduler.check_integrity()

    def run(self) -> list[list[int]]:
        while self.scheduler.has_work:
            self.step()
        return [list(one.token_ids[one.num_prompt :]) for one in self.sequences]

    def close(self) -> None:
        self.runner.close()
        assert self.runner.copies is not None
        self.runner.copies.close()

    @property
    def kv_bytes(self) -> int:
        """Returns the memory that keys and values really take."""
        cache = self.runner._cache
        if isinstance(cache, DynamicCache):
            buffers = [batch._buffers for batch in set(cache._batches.values())]
            return sum(one.nbytes for pair in buffers for half in pair for one in half)
        assert isinstance(cache, StaticCache)
        return sum(resident_bytes(memory.array) for memory in cache._memory if isinstance(memory, HostRows))


@pytest.mark.parametrize("kind", FOLDERS)
def test_lanes_that_are_reclaimed_give_their_memory_back_and_change_no_answer(kind: str) -> None:
    settings = pooled(FOLDERS[kind]())
    alone = Lender(settings, KvPool())
    for number in range(LANES):
        alone.add(7 * number, 40)
    expected = alone.run()
    pool = KvPool()
    busy, other = Lender(settings, pool), Lender(settings, pool)
    for number in range(LANES):
        busy.add(7 * number, 40)
    for _ in range(8):
        busy.step()
    assert len(busy.scheduler.running) == LANES
    whole = busy.kv_bytes
    for number in range(LANES):
        other.add(7 * number, 40)
    other.step()
    busy.step()
    other.step()
    assert (len(busy.scheduler.running), len(other.scheduler.running)) == (LANES // 2, LANES // 2)
    assert busy.kv_bytes < 0.75 * whole  # half of it, and pages that lanes share
    while busy.scheduler.has_work or other.scheduler.has_work:
        for model in (busy, other):
            model.step()
            assert busy.kv_bytes + other.kv_bytes <= settings.kv_pool_bytes, "both together keep to the budget"
    assert busy.run() == other.run() == expected
    for model in (alone, busy, other):
        model.close()
