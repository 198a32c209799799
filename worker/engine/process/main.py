"""The engine process: `python -m tokenbus.worker.engine.process.main FD`, started by a frontend and ended with it.
After the number comes `trial` if a model is only tried out: then most of the free memory is the limit, and others'
streams use the processors first.

It runs replicas of models, each with its own socket and step loop. Replicas of the same model share its weights.
"""

import tokenbus.protocol.process.lean_imports  # isort: skip  # noqa: F401  # before structlog

import contextlib
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import structlog

from tokenbus.protocol.process import memory, parent, priority
from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import errors
from tokenbus.worker.contract.engine_errors import DeviceError, ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.device.runner import LaneLender, Runner
from tokenbus.worker.engine.host_cache.cache_folder import CacheFolder
from tokenbus.worker.engine.memory import claims
from tokenbus.worker.engine.memory.claims import MemoryClaims
from tokenbus.worker.engine.memory.planner import MemoryPlanner
from tokenbus.worker.engine.process import ipc, replica
from tokenbus.worker.engine.process.device_sharing import KvPool, KvShare, StepGate
from tokenbus.worker.engine.scheduling.lanes import LaneShare
from tokenbus.worker.files import device_memory

TRIAL = "trial"
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dri", "/dev/dxg")
"""Drivers of GPUs map memory for their own purposes; it was not tried whether they work within a limit."""
EXIT_DEVICE_FAILED = 3
"""The exit status that tells the frontend that the device is at fault, not a model."""
EXIT_BUG = 1
_REPORT_S = 10.0
_MAX_EXIT_REASON_CHARS = 1_000
_FINGERPRINT = re.compile(r"[\w.-]{1,64}", re.ASCII)

Load = Callable[[EngineSettings, Callable[[float], None], Callable[[], None]], Runner]
"""Makes a replica's runner, and calls its second argument with the fraction loaded, and its third when the files are
there and a library begins to load them. Raises ModelError."""


class Loader(NamedTuple):
    """The functions that load the models of one engine."""

    load: Load
    lends_lanes: Callable[[EngineSettings], bool] = lambda settings: False
    """Whether a replica with these settings can lend its KV memory. Raises ModelError."""


OnExit = Callable[[str], None]
"""Called with the reason why the process is about to end."""


class ReplicaServer:
    """The replicas of one process, which ends with the last of them or when the device fails."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._find_loader = _make_find(self._report_exit)
        self._loading = threading.Lock()
        self._step_gate = StepGate()
        self._kv_pool = KvPool()
        self._lock = threading.Lock()
        self._num_replicas = 0

    def __repr__(self) -> str:
        return f"<ReplicaServer of {self._num_replicas} replicas>"

    def run(self) -> None:
        """Opens replicas as the frontend asks, until it closes the control socket."""
        for opened, sock, memory_fd in ipc.receive_with_sockets(self._control):
            with self._lock:
                self._num_replicas += 1
            name = f"replica {opened.number}"
            threading.Thread(target=self._serve, args=(opened, sock, memory_fd), name=name, daemon=True).start()

    def _serve(self, opened: ipc.OpenReplica, sock: socket.socket, memory_fd: int | None) -> None:
        """Runs a replica; the outermost frame of its thread."""
        settings = opened.settings
        kv_memory: KvShare | None = None

        def begin() -> None:
            with self._lock:
                self._control.sendall(ipc.encode(ipc.LoadBegan(opened.number)))

        def load(progress: Callable[[float], None]) -> Runner:
            nonlocal kv_memory
            with self._turn_to_load(progress):
                loader = self._find_loader(settings)
                if not settings.kv_pool_bytes or loader.lends_lanes(settings):
                    return loader.load(settings, progress, begin)
                kv_memory = fixed = self._kv_pool.reserve(settings)
                runner = loader.load(settings, progress, begin)
                fixed.resize(runner.config.kv_bytes)
                return runner

        def join_pool(runner: Runner, wake: Callable[[], None]) -> LaneShare | None:
            nonlocal kv_memory
            if not runner.config.kv_lane_bytes:
                return None
            assert isinstance(runner, LaneLender), runner
            if not settings.kv_pool_bytes:
                return runner.own_lanes
            kv_memory = share = self._kv_pool.join(settings, runner.config, runner, wake)
            return share

        try:
            with contextlib.suppress(ConnectionError):  # the frontend has closed this replica's socket
                kept = CacheFolder(settings.keep_cache, settings.keep_cache_mib << 20) if settings.keep_cache else None
                replica.serve(
                    sock,
                    load,
                    settings.step_target_ms / 1e3,
                    settings.scheduler,
                    self._step_gate,
                    debug=settings.debug,
                    memory_fd=memory_fd,
                    join_pool=join_pool,
                    folder=kept,
                )
            if kv_memory is not None:
                kv_memory.leave()
            sock.close()
            with self._lock:
                self._num_replicas -= 1
                self._control.sendall(ipc.encode(ipc.ReplicaClosed(opened.number)))
                if not self._num_replicas:
                    os._exit(0)
        except DeviceError as error:
            structlog.get_logger().error("device_failed", error=str(error))
            self._report_exit(str(error))
            os._exit(EXIT_DEVICE_FAILED)
        except BaseException as error:  # a thread's end would go unnoticed; the frontend restarts the process
            traceback.print_exc()
            self._report_exit("".join(traceback.format_exception_only(error)))
            os._exit(EXIT_BUG)

    @contextlib.contextmanager
    def _turn_to_load(self, progress: Callable[[float], None]) -> Iterator[None]:
        """Waits until no other model is being loaded, and reports while it waits: shared weights are read once, and
        errors are attributed correctly."""
        while not self._loading.acquire(timeout=_REPORT_S):
            progress(0.0)
        try:
            progress(0.0)
            yield
        finally:
            self._loading.release()

    def _report_exit(self, reason: str) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._control.sendall(ipc.encode(ipc.ExitReason(errors.as_text(reason.strip()[:_MAX_EXIT_REASON_CHARS]))))


def _sim_loader(on_exit: OnExit, planner: MemoryPlanner) -> Loader:
    from tokenbus.worker.engine.sim.runner import load

    return Loader(lambda settings, progress, begin: load(settings, progress))


def _gguf_loader(on_exit: OnExit, planner: MemoryPlanner) -> Loader:
    from tokenbus.worker.engine.gguf import backend
    from tokenbus.worker.engine.gguf.model import GgufModel
    from tokenbus.worker.engine.gguf.runner import load

    backend.on_abort(on_exit)
    models: LoadedModels[GgufModel] = LoadedModels()
    return Loader(lambda settings, progress, begin: load(settings, progress, models, planner, begin))


def _onnx_loader(on_exit: OnExit, planner: MemoryPlanner) -> Loader:
    from tokenbus.worker.engine.onnx.model import OnnxModel
    from tokenbus.worker.engine.onnx.runner import lends_lanes, load

    models: LoadedModels[OnnxModel] = LoadedModels()
    return Loader(lambda settings, progress, begin: load(settings, progress, models, planner, begin), lends_lanes)


_LOADERS: dict[str, Callable[[OnExit, MemoryPlanner], Loader]] = {
    "gguf": _gguf_loader,
    "onnx": _onnx_loader,
    "sim": _sim_loader,
}


def _make_find(on_exit: OnExit) -> Callable[[EngineSettings], Loader]:
    """Returns a function that finds the loader for a model; an engine's library is imported when the first model needs
    it. The function raises ModelError."""
    loaders: dict[str, Loader] = {}
    planner = MemoryPlanner(MemoryClaims(claims.runtime_directory()))

    def find_loader(settings: EngineSettings) -> Loader:
        if settings.fingerprint and not _FINGERPRINT.fullmatch(settings.fingerprint):
            raise ModelError(f"--fingerprint must be 1 to 64 of A-Z a-z 0-9 . _ -, got {settings.fingerprint!r}")
        engine = settings.engine
        if engine == "auto":
            from tokenbus.worker.models import registry

            engine = registry.engine_of(settings.model)
        if engine not in _LOADERS:
            raise ModelError(f"--engine must be one of auto, {', '.join(_LOADERS)}, got {engine}")
        if engine not in loaders:
            try:
                loaders[engine] = _LOADERS[engine](on_exit, planner)
            except (ImportError, OSError, RuntimeError) as error:  # llama_cpp raises RuntimeError for its library
                raise ModelError(f"the {engine} engine is not installed, or not completely: {error}") from error
        return loaders[engine]

    return find_loader


def main() -> None:
    parent.die_with_parent()  # a frozen process would not notice that its socket is closed
    logs.configure("engine")
    if TRIAL in sys.argv[2:]:
        memory.end_first()
        priority.go_last()
        if not any(map(os.path.exists, _GPU_DRIVERS)):
            memory.limit_own(device_memory.free_host_bytes() // 8 * 7)
    ReplicaServer(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)  # at once, even in the middle of a step: the frontend is gone


if __name__ == "__main__":
    main()
