"""Embeddings and scores from an engine, beside its streams."""

from collections.abc import Callable

from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.calls.pending_calls import PendingCalls

_MAX_PENDING = 64


class PoolingCalls:
    """Calls that have an engine make embeddings or scores. `send` gives it a command, unless it is dead."""

    def __init__(self, send: Callable[[ipc.Command], None]) -> None:
        self._send = send
        self._pending: PendingCalls[ipc.PoolResult] = PendingCalls()

    def __repr__(self) -> str:
        return f"<PoolingCalls {len(self)} pending>"

    def __len__(self) -> int:
        return len(self._pending)

    def check(self) -> None:
        """Raises RequestError if no further call may be made now."""
        if len(self._pending) >= _MAX_PENDING:
            raise errors.request_error(errors.Code.OVERLOADED)

    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        """Returns the embeddings of all inputs. Raises RequestError if the engine refuses it or dies."""
        result = await self._call(lambda call_id: ipc.EmbedCall(call_id, request))
        return internal.EmbedResult(vectors=result.rows, prompt_tokens=result.prompt_tokens)

    async def rerank(self, request: internal.Rerank) -> internal.RerankResult:
        """Returns the scores of all documents. Raises RequestError if the engine refuses it or dies."""
        result = await self._call(lambda call_id: ipc.RerankCall(call_id, request))
        return internal.RerankResult(scores=result.rows, prompt_tokens=result.prompt_tokens)

    async def _call(self, make_call: Callable[[int], ipc.EmbedCall | ipc.RerankCall]) -> ipc.PoolResult:
        return await self._pending.call(
            lambda call_id: self._send(make_call(call_id)), lambda call_id: self._send(ipc.AbortPooling(call_id))
        )

    def ended(self, result: ipc.PoolResult) -> None:
        """Ends a call with its result."""
        self._pending.end(result.call_id, result, result.error)

    def lose_engine(self) -> None:
        """Fails every call."""
        self._pending.fail_all()
