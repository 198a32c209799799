"""Ollama's read-only calls, with which editors discover a server's models before they use OpenAI's API."""

import datetime
import hashlib
from typing import Any

import msgspec

from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.serving.catalog import Listing, Model
from tokenbus.gateway.serving.dialect import Resource
from tokenbus.protocol.wire import codec, errors

VERSION = "0.12.6"
"""The version of Ollama that these answers match. Clients compare it with the oldest they support."""
ARCHITECTURE = "tokenbus"
_LATEST = ":latest"
_CAPABILITIES = {
    "generate": "completion",
    "tools": "tools",
    "reasoning": "thinking",
    "embed": "embedding",
    "fim": "insert",
}
"""Ollama's names for capabilities, by the features on models' cards."""


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a model's file, which this gateway does not know."""

    parent_model: str = ""
    format: str = ""
    family: str = ARCHITECTURE
    families: tuple[str, ...] = (ARCHITECTURE,)
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: Details


class OllamaModelList(msgspec.Struct, frozen=True, kw_only=True):
    models: list[ListedModel]


class RunningModel(ListedModel, frozen=True, kw_only=True):
    expires_at: str
    size_vram: int = 0
    context_length: int


class RunningModelList(msgspec.Struct, frozen=True, kw_only=True):
    models: list[RunningModel]


class ShowBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request about one model. Unknown fields are ignored."""

    model: str | None = None
    name: str | None = None
    """The older name of `model`."""


class ShownModel(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one model."""

    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: Details
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str = VERSION


class OllamaError(msgspec.Struct, frozen=True, kw_only=True):
    error: str


_NEVER = "2318-01-01T00:00:00Z"
_decoder = codec.Decoder(ShowBody)


def encode_error(response: ErrorResponse) -> bytes:
    """Returns the body of an error response."""
    return msgspec.json.encode(OllamaError(error=response.message))


def shown_name(body: bytes) -> str:
    """Returns the model that a body of `/api/show` names. Raises RequestError."""
    asked = _decoder.decode(body, codec.Encoding.JSON)
    name = asked.model or asked.name
    if not name:
        raise errors.invalid_field("model", "is required")
    return name


def show(listing: Listing, name: str) -> ShownModel:
    """Returns one model, whose name may end with `:latest`, which in Ollama means an untagged model. Raises
    RequestError."""
    if all(one.id != name for one in listing.models):
        name = name.removesuffix(_LATEST)
    model = listing.find(name)
    features = listing.features.get(model.root, ())
    return ShownModel(
        details=Details(),
        model_info={
            "general.architecture": ARCHITECTURE,
            "general.basename": model.root,
            f"{ARCHITECTURE}.context_length": model.context_length,
        },
        capabilities=[name for feature, name in _CAPABILITIES.items() if feature in features],
        modified_at=_time(model.created),
    )


def list_models(listing: Listing, name: str = "") -> OllamaModelList:
    """Returns the usable models."""
    return OllamaModelList(models=[ListedModel(**_listed(one)) for one in listing.models])


def list_running(listing: Listing, name: str = "") -> RunningModelList:
    """Returns the models that are loaded: all of them."""
    return RunningModelList(
        models=[
            RunningModel(**_listed(one), expires_at=_NEVER, context_length=one.context_length) for one in listing.models
        ]
    )


RESOURCES = (
    Resource(
        "/api/version",
        "The version of Ollama that these calls match",
        Version,
        lambda *_: Version(),
        is_public=True,  # clients use it to identify the server
    ),
    Resource("/api/tags", "The models, in Ollama's form", OllamaModelList, list_models),
    Resource("/api/ps", "The loaded models", RunningModelList, list_running),
    Resource("/api/show", "One model, in Ollama's form", ShownModel, show, body=ShowBody, model_in=shown_name),
)


def _listed(model: Model) -> dict[str, Any]:
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": _time(model.created),
        "digest": hashlib.sha256(model.root.encode()).hexdigest(),
        "details": Details(),
    }


def _time(created: int) -> str:
    return datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat().replace("+00:00", "Z")
