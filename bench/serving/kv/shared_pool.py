"""Counts how many sequences a busy model runs beside an idle one, and how soon the idle one is served when it wakes.

Run: .venv/bin/python -m bench.serving.kv.shared_pool [--lanes 16] [--rounds 9] [--graph gqa]

Two ONNX demo models share the memory of --lanes lanes in one process, as in a worker, each with a step loop on its own
thread. First each has half of the memory, then both borrow from one pool. In each round the busy model runs as many
sequences as it can, and then the other one gets a request. Counted are the steps of the busy model that end while the
other one waits for a lane, and the steps of the other one until its first token, whose time is compared with that in an
idle pool."""

import argparse
import queue
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from tokenbus.demo import ONNX_PATH, export_onnx
from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import block_hash, codec
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.kv.ledger import KvUsage
from tokenbus.worker.engine.onnx.model import OnnxModel
from tokenbus.worker.engine.onnx.runner import OnnxRunner, load
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.process.kv_pool import KvPool, KvShare
from tokenbus.worker.engine.process.loop import Inbox, LanesChanged, StepLoop

_CONTEXT = 1_024
_PROMPT_TOKENS = 32
_LONG = 900
"""Tokens of an answer that outlasts a round."""
_TIMEOUT_S = 120


class _Event(NamedTuple):
    """A model has done something: computed a step, waited for lanes, given some back, or sampled a first token."""

    model: str
    what: str
    at: float


class _RecordedShare:
    """A share of a pool that records when there is no lane and when some are given back."""

    def __init__(self, share: KvShare, name: str, events: "queue.SimpleQueue[_Event]") -> None:
        self._share, self._name, self._events = share, name, events
        self._held = 0

    def request(self, used: int, idle: int, wanted: int) -> int:
        allowed = self._share.request(used, idle, wanted)
        if wanted and not allowed:
            self._events.put(_Event(self._name, "waits", time.monotonic()))
        return allowed

    def give_back(self, lanes: int) -> None:
        self._share.give_back(lanes)
        if lanes < self._held:
            self._events.put(_Event(self._name, "gave back", time.monotonic()))
        self._held = lanes

    def usage(self) -> KvUsage:
        return self._share.usage()


class _Model:
    """A model's step loop on a thread of its own."""

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        models: LoadedModels[OnnxModel],
        pool: KvPool | None,
        events: "queue.SimpleQueue[_Event]",
    ) -> None:
        self._name, self._events = name, events
        self.inbox: Inbox = queue.SimpleQueue()
        self.running = 0
        self._last_number = 0
        runner = load(settings, lambda fraction: None, models)
        assert isinstance(runner, OnnxRunner)
        self._runner = runner
        if runner.copies is not None:
            runner.copies.open(None)
        self._share = None
        if pool is not None:
            self._share = pool.join(settings, runner.config, runner, lambda: self.inbox.put(LanesChanged()))
        recorded = None if self._share is None else _RecordedShare(self._share, name, events)
        self._loop = StepLoop(runner, self.inbox, self._report, 0.4, lane_share=recorded)
        self._thread = threading.Thread(target=self._loop.run, daemon=True)
        self._thread.start()

    def ask(self, max_tokens: int) -> int:
        """Gives the model a request; returns its number."""
        self._last_number += 1
        token_ids = [20 + (self._last_number * 37 + place) % 500 for place in range(_PROMPT_TOKENS)]
        sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
        self.inbox.put(ipc.Add(self._last_number, block_hash.pack_token_ids(token_ids), sampling, ("bench", "")))
        return self._last_number

    def abort_all(self) -> None:
        for number in range(1, self._last_number + 1):
            self.inbox.put(ipc.Abort(number))

    def close(self) -> None:
        self.inbox.put(None)
        self._thread.join()
        if self._share is not None:
            self._share.leave()
        self._runner.close()
        if self._runner.copies is not None:
            self._runner.copies.close()

    def _report(self, report: ipc.Report) -> None:
        if not isinstance(report, ipc.StepReport):
            return
        self.running = report.load.running
        if report.stats is not None:
            self._events.put(_Event(self._name, "step", time.monotonic()))
        for output in report.outputs:
            if output.cached_tokens is not None:
                self._events.put(_Event(self._name, "first token", time.monotonic()))


class _Wake(NamedTuple):
    """The events from a request to an idle model until its first token."""

    busy_steps: int
    own_steps: int
    ttft_ms: float


class _Pair:
    """Two models over `lanes` lanes of memory, in one pool or with half each."""

    def __init__(self, model: Path, lanes: int, *, shared: bool) -> None:
        row_bytes = _row_bytes(model)
        settings = EngineSettings(model=str(model), engine="onnx", threads=1, context_length=_CONTEXT)
        if shared:
            settings = codec.replace(settings, kv_pool_bytes=lanes * row_bytes, max_num_seqs=lanes)
        else:
            settings = codec.replace(settings, kv_limit_bytes=lanes * row_bytes // 2)
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        pool = KvPool() if shared else None
        models: LoadedModels[OnnxModel] = LoadedModels()
        self.busy = _Model("busy", settings, models, pool, self.events)
        self.other = _Model("other", settings, models, pool, self.events)
        self._lanes = lanes

    def fill(self) -> int:
        """Gives the busy model work for all lanes; returns how many sequences it then runs."""
        for _ in range(self._lanes):
            self.busy.ask(_LONG)
        most, deadline = 0, time.monotonic() + _TIMEOUT_S
        settled = 0
        while settled < 8:  # steps without another one
            assert time.monotonic() < deadline
            if self.events.get(timeout=_TIMEOUT_S).what != "step":
                continue
            settled = 0 if self.busy.running > most else settled + 1
            most = max(most, self.busy.running)
        return most

    def wake(self) -> _Wake:
        """Gives the other model a request, and waits for its first token."""
        while not self.events.empty():
            self.events.get()
        began = time.monotonic()
        self.other.ask(1)
        busy_steps = own_steps = 0
        is_reclaiming = False
        while True:
            event = self.events.get(timeout=_TIMEOUT_S)
            if event.what in ("waits", "gave back"):
                is_reclaiming = event.what == "waits"
            elif event.model == "busy":
                busy_steps += is_reclaiming
            elif event.what == "step":
                own_steps += 1
            elif event.what == "first token":  # reported with the step that sampled it
                return _Wake(busy_steps, own_steps, (event.at - began) * 1e3)

    def empty(self) -> None:
        self.busy.abort_all()
        while self.busy.running:
            time.sleep(0.01)

    def close(self) -> None:
        self.busy.close()
        self.other.close()


def _row_bytes(model: Path) -> int:
    """Returns the memory of one lane, read from an error."""
    try:
        settings = EngineSettings(model=str(model), engine="onnx", context_length=_CONTEXT, kv_limit_bytes=1)
        load(settings, lambda fraction: None, LoadedModels())
    except ModelError as error:
        return int(str(error).partition("which takes ")[2].split()[0])
    raise AssertionError("a byte has room for a context")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--graph", choices=("gqa", "plain"), default="gqa")
    options = parser.parse_args()
    logs.log_errors_only()
    with tempfile.TemporaryDirectory() as folder:
        model = ONNX_PATH
        if options.graph == "gqa":
            model = Path(folder)
            export_onnx.export(model, "gqa")
        halves = _Pair(model, options.lanes, shared=False)
        with_halves = halves.fill()
        halves.close()
        pair = _Pair(model, options.lanes, shared=True)
        alone = [pair.wake().ttft_ms for _ in range(options.rounds)]
        counts, wakes = [], []
        for _ in range(options.rounds):
            counts.append(pair.fill())
            wakes.append(pair.wake())
            pair.empty()
        pair.close()
    print(f"sequences of the busy model: {min(counts)} in a pool, {with_halves} with halves")
    print(f"steps of the busy model until it has given a lane back: at most {max(one.busy_steps for one in wakes)}")
    print(f"steps of the woken model until its first token: at most {max(one.own_steps for one in wakes)}")
    low, middle, high = statistics.quantiles([one.ttft_ms for one in wakes], n=4)
    print(
        f"its first token: {middle:.1f} ms ({low:.1f} to {high:.1f}), {statistics.median(alone):.1f} ms in an idle pool"
    )


if __name__ == "__main__":
    main()
