"""The Python client of a Tokenbus system; docs/client.md shows how to use it."""

from tokenbus.client.answer import Answer, AnswerChunk, AnswerTimings, CallDelta, TokenUsage, ToolCall
from tokenbus.client.client import Client
from tokenbus.client.errors import (
    AccessDeniedError,
    BrokerUnreachableError,
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PromptTooLongError,
    RequestCancelledError,
    RequestLostError,
    ServerFailureError,
    TokenbusError,
    UnavailableError,
)
from tokenbus.client.replies import Embeddings, PromptTokens, Ranking, ServedModelInfo
from tokenbus.client.stream import Stream
from tokenbus.client.sync_client import SyncClient, SyncStream
from tokenbus.client.wire.request_fields import (
    ChatMessageFields,
    DetokenizeFields,
    EmbedFields,
    GenerateFields,
    RerankFields,
    TokenizeFields,
)
from tokenbus.protocol.wire.errors import RequestError as RequestError
from tokenbus.protocol.wire.messages import FinishReason

__all__ = [
    "AccessDeniedError",
    "Answer",
    "AnswerChunk",
    "AnswerTimings",
    "BrokerUnreachableError",
    "CallDelta",
    "ChatMessageFields",
    "Client",
    "DeadlineExceededError",
    "DetokenizeFields",
    "EmbedFields",
    "Embeddings",
    "FinishReason",
    "GenerateFields",
    "InvalidRequestError",
    "ModelNotFoundError",
    "OverloadedError",
    "PromptTokens",
    "PromptTooLongError",
    "Ranking",
    "RequestCancelledError",
    "RequestLostError",
    "RerankFields",
    "ServedModelInfo",
    "ServerFailureError",
    "Stream",
    "SyncClient",
    "SyncStream",
    "TokenUsage",
    "TokenbusError",
    "TokenizeFields",
    "ToolCall",
    "UnavailableError",
]

if __name__ != "tokenbus.client":
    raise ImportError("import tokenbus.client: it is not a top-level package")
