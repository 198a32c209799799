"""LLM inference workers behind a NATS broker: `from tokenbus import Client`; docs/client.md shows how to use it.

An installed Tokenbus is this one package. In the repository its parts are folders beside it that are linked into it.
Importing it loads none of them: the public names are looked up when they are first used."""

# ruff: noqa: F403, F405

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenbus.client import *

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
_FORMER = ("RequestError",)
"""Names that programs for earlier versions import."""


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("tokenbus.client"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
