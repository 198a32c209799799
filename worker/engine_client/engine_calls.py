"""Calls to an engine, apart from its streams: LoRA adapters, embeddings and scores, and others that await a reply."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Set
from typing import Generic, TypeVar

import structlog

from tokenbus.protocol.wire import codec, errors, internal
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.engine_faults import MAX_CRASHES

ResultT = TypeVar("ResultT")


class PendingCalls(Generic[ResultT]):
    """Pending calls of one kind, each known by its call id."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[ResultT]] = {}
        self._last_call_id = 0

    def __repr__(self) -> str:
        return f"<PendingCalls {len(self._open)} open>"

    def __len__(self) -> int:
        return len(self._open)

    async def call(self, send: Callable[[int], None]) -> ResultT:
        """Sends a call under a new id, and waits for its result. Raises the RequestError with which it ends."""
        self._last_call_id += 1
        call_id = self._last_call_id
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._open[call_id] = future
        try:
            send(call_id)
            return await future
        finally:
            del self._open[call_id]

    def end(self, call_id: int, result: ResultT, error: errors.Error | None = None) -> None:
        """Ends a call with its result, or with an error if there is one. Its caller may be gone."""
        future = self._open.get(call_id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(errors.RequestError(error))

    def fail_all(self) -> None:
        """Fails every call with `worker_lost`: no reply will come."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(errors.request_error(errors.Code.WORKER_LOST))


class EngineAdapters:
    """Loads and unloads adapters. `send` gives the engine a command. `held` returns the digests of adapters that
    held-back sequences use; the engine does not know about these, so they are unloaded later."""

    def __init__(self, send: Callable[[ipc.Command], None], held: Callable[[], set[str]]) -> None:
        self._send = send
        self._held = held
        self._loading: PendingCalls[str] = PendingCalls()
        self._loaded: Counter[str] = Counter()
        """The number of times each was loaded, by digest."""
        self._unloading: list[str] = []
        """Those to be unloaded once no held-back sequence needs them."""

    def __repr__(self) -> str:
        return f"<EngineAdapters of {len(self._loaded)} files, {len(self._unloading)} to unload>"

    async def load(self, path: str) -> str:
        """Returns the digest of the adapter. Raises RequestError if the engine refuses it or dies."""
        digest = await self._loading.call(lambda call_id: self._send(ipc.LoadAdapter(call_id, path)))
        self._loaded[digest] += 1
        return digest

    def unload(self, digest: str) -> None:
        """Reverses one `load`. After the last one, new requests can no longer use the adapter."""
        if self._loaded[digest]:
            self._loaded[digest] -= 1
            self._loaded = +self._loaded  # drops counts of zero
            self._unloading.append(digest)
            self.send_unloads()

    def send_unloads(self) -> None:
        """Makes the engine unload what is due. Call it whenever a sequence is no longer held back."""
        if self._unloading:
            held = self._held()
            for digest in [one for one in self._unloading if one not in held]:
                self._unloading.remove(digest)
                self._send(ipc.UnloadAdapter(digest))

    def has_all(self, request: engine_request.EngineRequest) -> bool:
        """Whether a request's adapters are loaded."""
        return all(self._loaded[one.digest] for one in request.adapters)

    def check(self, request: engine_request.EngineRequest) -> None:
        """Raises RequestError if one of the request's adapters is not loaded."""
        if not self.has_all(request):
            raise errors.request_error(errors.Code.NO_WORKER, "the adapter is not loaded here", param="lora")

    def loaded(self, result: ipc.AdapterResult) -> None:
        """Ends a `load`."""
        self._loading.end(result.call_id, result.digest, result.error)

    def lose_engine(self) -> None:
        """Forgets all adapters, and fails every `load` in progress."""
        self._loaded.clear()
        self._unloading.clear()
        self._loading.fail_all()


_MAX_PENDING = 64
_GRACE_S = 1.0
"""An engine itself ends a call at its deadline, with the answer to what it has just computed."""


class _Call:
    """A call that waits for its result."""

    def __init__(self, call_id: int, request: internal.Embed | internal.Rerank) -> None:
        self.call_id = call_id
        self.request = request
        self.deadline = time.monotonic() + request.remaining_ms / 1e3
        self.result: asyncio.Future[ipc.PoolResult] = asyncio.get_running_loop().create_future()
        self.is_sent = False
        self.has_begun = False
        """Whether the engine has computed any of it, or is doing so."""
        self.crashes = 0
        """The number of engines that died with inputs of this call in their batch."""

    def fail(self, error: errors.Error) -> None:
        if not self.result.done():
            self.result.set_exception(errors.RequestError(error))

    def command(self) -> ipc.EmbedCall | ipc.RerankCall:
        """Returns the command that gives the call to an engine now."""
        request = codec.replace(self.request, remaining_ms=(self.deadline - time.monotonic()) * 1e3)
        if isinstance(request, internal.Embed):
            return ipc.EmbedCall(self.call_id, request)
        return ipc.RerankCall(self.call_id, request)


class PoolingCalls:
    """Calls that ask an engine for embeddings or scores.

    Calls that may have killed an engine are retried once by the next one, each alone: it gets no other call until they
    are done. A call that kills that engine too is refused for good."""

    def __init__(self, send: Callable[[ipc.Command], None], ended: Callable[[], None]) -> None:
        """`send` gives the engine a command, if there is one, and `ended` is called when a call is over."""
        self._send = send
        self._ended = ended
        self._has_engine = False
        self._calls: dict[int, _Call] = {}
        self._last_call_id = 0
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<PoolingCalls {len(self)} pending>"

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def are_computing(self) -> bool:
        """Whether there are calls, and an engine that has them."""
        return self._has_engine and bool(self._calls)

    @property
    def are_on_probation(self) -> bool:
        """Whether any call may have killed an engine, so that this engine gets no others meanwhile."""
        return any(call.crashes for call in self._calls.values())

    def engine_serves(self) -> None:
        """Gives a new engine the pending calls."""
        self._has_engine = True
        self._send_next()

    async def call(self, request: internal.Embed | internal.Rerank) -> ipc.PoolResult:
        """Returns the rows of all inputs. Raises RequestError if it is refused here or there, or the engine dies."""
        if len(self._calls) >= _MAX_PENDING:
            raise errors.request_error(errors.Code.OVERLOADED)
        self._last_call_id += 1
        call = self._calls[self._last_call_id] = _Call(self._last_call_id, request)
        self._send_next()
        try:
            async with asyncio.timeout(request.remaining_ms / 1e3 + _GRACE_S):
                return await call.result
        except TimeoutError as error:  # there is no engine, or it hangs: else it would have answered
            self._take_back(call)
            raise errors.request_error(errors.Code.DEADLINE_EXCEEDED) from error
        except asyncio.CancelledError:
            self._take_back(call)
            raise
        finally:
            del self._calls[call.call_id]
            self._send_next()
            self._ended()

    def _take_back(self, call: _Call) -> None:
        if call.is_sent:
            self._send(ipc.AbortPooling(call.call_id))

    def _send_next(self) -> None:
        """Gives the engine the calls that it may have now."""
        if not self._has_engine:
            return
        for call in [one for one in self._calls.values() if not one.is_sent and time.monotonic() > one.deadline]:
            call.fail(errors.make_error(errors.Code.DEADLINE_EXCEEDED))
        open_calls = [one for one in self._calls.values() if not one.result.done()]
        if suspects := [one for one in open_calls if one.crashes]:
            open_calls = [] if any(one.is_sent for one in open_calls) else suspects[:1]
        for call in open_calls:
            if not call.is_sent:
                call.is_sent = True
                self._send(call.command())

    def begin(self, call_ids: list[int]) -> None:
        """Notes which calls have inputs in the engine's batch."""
        for call_id in call_ids:
            if call := self._calls.get(call_id):
                call.has_begun = True

    def ended(self, result: ipc.PoolResult) -> None:
        """Ends a call with its result. Its caller may be gone."""
        call = self._calls.get(result.call_id)
        if call is None:
            return
        if result.error is not None:
            call.fail(result.error)
        elif not call.result.done():
            call.result.set_result(result)

    def lose_engine(self, suspects: Set[int], *, may_be_unbegun: bool) -> None:
        """Keeps the suspects for the next engine, and fails all others, which another worker may serve sooner. Without
        suspects, the texts of a call that the engine had not begun to compute may have killed it."""
        self._has_engine = False
        if not suspects and may_be_unbegun:
            suspects = {one.call_id for one in self._calls.values() if one.is_sent and not one.has_begun}
        for call in self._calls.values():
            call.is_sent = call.has_begun = False
            call.crashes += call.call_id in suspects
            if call.crashes >= MAX_CRASHES:
                self._log.error("request_crashes_engine", request_id=call.request.call_id)
                call.fail(errors.make_error(errors.Code.REQUEST_CRASHES_ENGINE))
            elif not call.crashes:
                call.fail(errors.make_error(errors.Code.WORKER_LOST))

    def fail(self) -> None:
        """Fails every call: no engine takes them over."""
        for call in self._calls.values():
            call.fail(errors.make_error(errors.Code.WORKER_LOST))
