"""Step loops of one process borrow lanes from a pool, each on a thread of its own."""

import queue
import threading
import time

import pytest

from tests.support.arithmetic import ArithmeticRunner, make_config
from tokenbus.protocol.wire import block_hash, codec
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.process.device_sharing import KvPool
from tokenbus.worker.engine.process.loop import Inbox, LanesChanged, StepLoop

LANES = 8
LANE_BYTES = 1_000
CONFIG = codec.replace(
    make_config(max_num_seqs=LANES, total_kv_blocks=LANES * 32), kv_bytes=LANES * LANE_BYTES, kv_lane_bytes=LANE_BYTES
)


def pool_settings(model: str, **fields: int) -> EngineSettings:
    return EngineSettings(model=model, kv_pool_bytes=LANES * LANE_BYTES, **fields)  # type: ignore[arg-type]


class LendingRunner(ArithmeticRunner):
    """A runner that counts how often it was asked for memory."""

    num_releases = 0

    def release_lanes(self) -> None:
        self.num_releases += 1


class Model:
    """A step loop on a thread, and the reports that it has made."""

    def __init__(self, pool: KvPool, name: str, step_s: float = 0.002) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.runner = LendingRunner(CONFIG, num_lanes=LANES, step_s=step_s)
        self.reports: queue.SimpleQueue[ipc.Report] = queue.SimpleQueue()
        self.share = pool.join(pool_settings(name), CONFIG, self.runner, lambda: self.inbox.put(LanesChanged()))
        self.loop = StepLoop(self.runner, self.inbox, self.reports.put, 0.05, lane_share=self.share, debug=True)
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def add(self, seq_no: int, max_tokens: int) -> None:
        sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
        self.inbox.put(ipc.Add(seq_no, block_hash.pack_token_ids([seq_no] * 4), sampling, ("acme", "")))

    def until_running(self, count: int) -> ipc.StepReport:
        while True:
            report = self.reports.get(timeout=10)
            if isinstance(report, ipc.StepReport) and report.load.running == count:
                return report

    def until_ended(self, count: int) -> None:
        ended = 0
        while ended < count:
            report = self.reports.get(timeout=20)
            if isinstance(report, ipc.StepReport):
                ended += sum(one.finish_reason is not None for one in report.outputs)

    def stop(self) -> None:
        self.inbox.put(None)
        self.thread.join(10)
        self.share.leave()


def test_a_busy_model_gives_lanes_to_one_that_wakes_and_has_them_again_afterwards() -> None:
    pool = KvPool()
    busy, other = Model(pool, "busy"), Model(pool, "other")
    for number in range(1, LANES + 1):
        busy.add(number, 400)
    busy.until_running(LANES)
    other.add(1, 2)
    other.until_ended(1)
    stats = busy.until_running(LANES - 1).kv_pool
    assert stats == ipc.KvPoolStats(8_000, 7_000, 4_000, 8_000, reclaimed_idle=0, reclaimed_used=LANE_BYTES)
    assert busy.until_running(LANES).load.waiting == 0
    busy.until_ended(LANES)
    busy.stop()
    other.stop()


def test_a_model_that_waits_for_memory_computes_nothing_and_asks_nothing() -> None:
    pool = KvPool()
    busy, other = Model(pool, "busy", step_s=0.5), Model(pool, "other")
    for number in range(1, LANES + 1):
        busy.add(number, 4)
    busy.until_running(LANES)
    other.add(1, 1)
    time.sleep(0.1)
    assert (other.runner.num_steps, other.runner.num_releases) == (0, 1)
    other.until_ended(1)
    busy.until_ended(LANES)
    busy.stop()
    other.stop()


def test_fixed_memory_is_taken_from_a_busy_model_before_it_is_there() -> None:
    pool = KvPool()
    busy = Model(pool, "busy")
    for number in range(1, LANES + 1):
        busy.add(number, 300)
    busy.until_running(LANES)
    fixed = pool.reserve(pool_settings("fixed", kv_limit_bytes=5 * LANE_BYTES))
    assert busy.share.usage().held_bytes <= 3 * LANE_BYTES
    fixed.resize(4 * LANE_BYTES)
    busy.until_running(4)
    fixed.leave()
    busy.until_running(LANES)
    busy.until_ended(LANES)
    busy.stop()


def test_fixed_memory_that_is_not_given_back_in_time_is_refused_and_nothing_has_changed() -> None:
    pool = KvPool(reclaim_s=0.01)
    share = pool.join(pool_settings("hung"), CONFIG, LendingRunner(CONFIG), lambda: None)
    assert share.request(used=0, idle=0, wanted=LANES) == LANES
    with pytest.raises(ModelError, match=r"^--kv-budget: other models have not given 5000 bytes back within 0\.01 s"):
        pool.reserve(pool_settings("late", kv_limit_bytes=5 * LANE_BYTES))
    assert share.request(used=LANES, idle=0, wanted=0) == LANES


def test_a_late_model_that_no_pool_has_a_lane_for_is_refused_and_the_others_go_on() -> None:
    pool = KvPool()
    pool.reserve(pool_settings("fixed", kv_limit_bytes=7 * LANE_BYTES))
    one = Model(pool, "one")
    with pytest.raises(ModelError, match=r"leaves 0 of 8000 bytes for late, which needs 1000.*fixed 7000"):
        pool.join(pool_settings("late"), CONFIG, LendingRunner(CONFIG), lambda: None)
    one.add(1, 3)
    one.add(2, 3)
    one.until_ended(2)
    one.stop()
