"""Requests to rank documents."""

from tokenbus.protocol.wire import errors, internal, messages
from tokenbus.protocol.wire.checks import pooling
from tokenbus.router.requests.pooling.pooling_request import PoolingRequest
from tokenbus.router.requests.pooling.pooling_requests import PoolingRequests

RerankRequest = PoolingRequest[messages.RerankRequest, internal.Rerank]


class Reranks(PoolingRequests[messages.RerankRequest, internal.Rerank, internal.RerankResult]):
    """The requests to rank documents of one router."""

    operation = "rerank"
    otel_operation = "rerank"
    unsupported = "this model scores no documents"
    inputs_field = "documents"

    def check(self, body: messages.RerankRequest) -> internal.Rerank:
        return pooling.check_rerank_request(body)

    def make_refusal(self, request_id: str, error: errors.Error) -> messages.RerankReply:
        return messages.RerankReply(id=request_id, error=error)

    def _make_reply(self, request: RerankRequest, result: internal.RerankResult) -> messages.RerankReply:
        tokens = result.prompt_tokens
        return messages.RerankReply(
            id=request.request_id,
            model=request.address.model,
            results=pooling.rank(result.scores, request.body.top_n),
            usage=messages.Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens, cached_tokens=0),
        )

    def _find_fault(self, work: internal.Rerank, result: internal.RerankResult) -> str | None:
        if len(result.scores) == 4 * len(work.documents):
            return None
        return f"it has {len(result.scores)} bytes for {len(work.documents)} documents"

    def _log_received(self, request_id: str, model: str) -> None:
        self._log.info("rerank_received", request_id=request_id, model=model)

    def log_refused(self, request_id: str, error: errors.Error) -> None:
        self._log.info("rerank_refused", request_id=request_id, code=error.code, param=error.param)

    def _log_finished(self, request_id: str, code: str | None, prompt_tokens: int, total_ms: float) -> None:
        self._log.info(
            "rerank_finished", request_id=request_id, code=code, prompt_tokens=prompt_tokens, total_ms=total_ms
        )
