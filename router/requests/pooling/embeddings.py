"""Embedding requests."""

from tokenbus.protocol.wire import errors, internal, messages
from tokenbus.protocol.wire.checks import pooling
from tokenbus.router.requests.pooling.pooling_request import PoolingRequest
from tokenbus.router.requests.pooling.pooling_requests import PoolingRequests

EmbeddingRequest = PoolingRequest[messages.EmbedRequest, internal.Embed]


class Embeddings(PoolingRequests[messages.EmbedRequest, internal.Embed, internal.EmbedResult]):
    """The embedding requests of one router."""

    operation = "embed"
    otel_operation = "embeddings"
    unsupported = "this model makes no embeddings"
    inputs_field = "input"

    def check(self, body: messages.EmbedRequest) -> internal.Embed:
        return pooling.check_embed_request(body)

    def make_refusal(self, request_id: str, error: errors.Error) -> messages.EmbedReply:
        return messages.EmbedReply(id=request_id, error=error)

    def _make_reply(self, request: EmbeddingRequest, result: internal.EmbedResult) -> messages.EmbedReply:
        tokens = result.prompt_tokens
        return messages.EmbedReply(
            id=request.request_id,
            model=request.address.model,
            embeddings=pooling.to_rows(result.vectors, len(request.work.inputs), request.body.encoding),
            usage=messages.Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens, cached_tokens=0),
        )

    def _find_fault(self, work: internal.Embed, result: internal.EmbedResult) -> str | None:
        # Every input has the same number of 32-bit floats.
        if result.vectors and len(result.vectors) % (4 * len(work.inputs)) == 0:
            return None
        return f"it has {len(result.vectors)} bytes for {len(work.inputs)} inputs"

    def _log_received(self, request_id: str, model: str) -> None:
        self._log.info("embed_received", request_id=request_id, model=model)

    def log_refused(self, request_id: str, error: errors.Error) -> None:
        self._log.info("embed_refused", request_id=request_id, code=error.code, param=error.param)

    def _log_finished(self, request_id: str, code: str | None, prompt_tokens: int, total_ms: float) -> None:
        self._log.info(
            "embed_finished", request_id=request_id, code=code, prompt_tokens=prompt_tokens, total_ms=total_ms
        )
