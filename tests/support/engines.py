"""Engines for tests: the real process with the demo model, and a step loop in a thread behind the same client."""

import asyncio
import atexit
import contextlib
import functools
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from llama_cpp import llama_cpp as llama

from tests.support.models import random_stateful
from tokenbus import demo
from tokenbus.worker.contract import engine_output
from tokenbus.worker.contract.engine_errors import DeviceError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.gguf.runner import GgufRunner, load
from tokenbus.worker.engine.process import replica
from tokenbus.worker.engine_client import engine_process
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_faults import CrashAttribution
from tools.demo_model import export_onnx


class ThreadLink(engine_process.EngineLink):
    """A step loop in a thread of this process, at the other end of a socket."""

    def __init__(self, load: Callable[[Callable[[float], None]], Runner]) -> None:
        ours, self._theirs = socket.socketpair()
        super().__init__(ours, 0, CrashAttribution(), self._cut, self._until_ended)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(load,), daemon=True)
        self._thread.start()

    def _cut(self) -> None:
        """Cuts the connection, like the death of a process."""
        self._theirs.shutdown(socket.SHUT_RDWR)

    async def _until_ended(self) -> str:
        await asyncio.to_thread(self._thread.join)
        return "the loop ended"

    def _serve(self, load: Callable[[Callable[[float], None]], Runner]) -> None:
        try:
            replica.serve(self._theirs, load, step_target_s=0.05)
        except (DeviceError, OSError, SystemExit):
            pass
        finally:
            with contextlib.suppress(OSError):
                self._theirs.shutdown(socket.SHUT_RDWR)  # a thread may be reading, for which a close is no end
            self._theirs.close()


def thread_engine(load: Callable[[Callable[[float], None]], Runner], max_waiting: int = 64) -> EngineClient:
    """Returns a client of an engine that runs in a thread, with the runner that `load` makes."""

    async def launch() -> engine_process.EngineLink:
        return ThreadLink(load)

    return EngineClient(launch, max_waiting)


DEMO = EngineSettings(
    model=str(demo.MODEL_PATH),
    threads=1,
    max_num_seqs=8,
    context_length=512,
    kv_tokens=4096,
    max_num_batched_tokens=256,
)

ONNX = EngineSettings(
    model=str(demo.ONNX_PATH),
    engine="onnx",
    threads=1,
    max_num_seqs=8,
    context_length=512,
    max_num_batched_tokens=256,
)


@functools.cache
def gqa_demo() -> Path:
    """Returns the demo model with GroupQueryAttention, written once for all tests."""
    folder = Path(tempfile.mkdtemp(prefix="tokenbus-gqa-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    export_onnx.export(folder, "gqa")
    return folder


@functools.cache
def stateful(kind: str) -> EngineSettings:
    """Returns settings for a tiny random model whose state can't be cut at a token, with which a token's logits hardly
    depend on the batch that it is computed in."""
    folder = Path(tempfile.mkdtemp(prefix="tokenbus-stateful-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = folder / f"{kind}.gguf"
    random_stateful.write(model, kind, random_stateful.TINY)
    return msgspec.structs.replace(
        DEMO, model=str(model), flash_attention="off", cache_type_k="f32", cache_type_v="f32"
    )


@functools.cache
def exact_demo() -> EngineSettings:
    """Returns settings with which a token's logits hardly depend on the batch that it is computed in: 32 bits, and no
    flash attention. They differ by 0.00003 at most; with `DEMO` by 0.05, which changes one draw of 500."""
    folder = Path(tempfile.mkdtemp(prefix="tokenbus-exact-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = folder / "exact.gguf"
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama.LLAMA_FTYPE_ALL_F32, True
    assert llama.llama_model_quantize(str(demo.MODEL_PATH).encode(), str(model).encode(), params) == 0
    return msgspec.structs.replace(
        DEMO, model=str(model), flash_attention="off", cache_type_k="f32", cache_type_v="f32"
    )


def demo_engine(settings: EngineSettings = DEMO) -> EngineClient:
    """Returns a client of a real engine process with the demo model."""
    process = engine_process.EngineProcess()
    return EngineClient(lambda: process.open(settings), max_waiting=64)


def gguf_runner(settings: EngineSettings) -> GgufRunner:
    """Returns a runner of a GGUF model that generates, in this process."""
    runner = load(settings, lambda share: None)
    assert isinstance(runner, GgufRunner)
    return runner


class Recorder:
    """A sink that keeps all outputs and can wait for them."""

    def __init__(self) -> None:
        self.outputs: list[engine_output.Output] = []
        self._changed = asyncio.Event()

    def __call__(self, output: engine_output.Output) -> None:
        self.outputs.append(output)
        self._changed.set()

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def texts(self) -> list[str]:
        """The text of each resumed token, and then that of each output."""
        return [text for output in self.outputs for text in output.resumed_texts or [output.text]]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def terminals(self) -> list[engine_output.Output]:
        return [output for output in self.outputs if output.finish_reason is not None]

    async def until(self, enough: Callable[["Recorder"], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not enough(self):
                self._changed.clear()
                await self._changed.wait()

    async def terminal(self, timeout_s: float = 60.0) -> engine_output.Output:
        await self.until(lambda recorder: bool(recorder.terminals), timeout_s)
        return self.terminals[0]
