"""The LoRA adapters of one engine, as its client knows them."""

from collections import Counter
from collections.abc import Callable

from tokenbus.protocol.wire import errors
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.pending_calls import PendingCalls


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
