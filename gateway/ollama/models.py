"""Ollama's calls about models, with which clients discover a server and what it can do."""

import datetime
import hashlib
from typing import Any

import msgspec

from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.ollama.options import untagged
from tokenbus.gateway.serving.catalog import Listing, Model
from tokenbus.gateway.serving.dialect import RefusedPath, Resource
from tokenbus.protocol.wire import codec, errors

VERSION = "0.12.6"
"""The version of Ollama that these answers match. Clients compare it with the oldest they support."""
ARCHITECTURE = "tokenbus"
_CAPABILITIES = {
    "generate": "completion",
    "tools": "tools",
    "reasoning": "thinking",
    "embed": "embedding",
    "fim": "insert",
}
"""Ollama's names for capabilities, by the features on models' cards."""


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a model, and what a gateway does not know of its file."""

    parent_model: str = ""
    format: str = ""
    """The engine that serves it, such as `gguf`; empty if unknown."""
    family: str = ARCHITECTURE
    families: tuple[str, ...] = (ARCHITECTURE,)
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int = 0
    """Memory of a worker's engine in bytes, in the list of loaded models; else 0, since a gateway sees no files."""
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


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """A model is ready to be requested. Also the only line of a stream."""

    status: str = "success"


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str = VERSION


class OllamaError(msgspec.Struct, frozen=True, kw_only=True):
    error: str


_NEVER = "2318-01-01T00:00:00Z"
_decoder = codec.Decoder(ShowBody)


def encode_error(response: ErrorResponse) -> bytes:
    """Returns the body of an error response."""
    return msgspec.json.encode(OllamaError(error=response.message))


def named_model(body: bytes) -> str:
    """Returns the model that a body names. Raises RequestError."""
    asked = _decoder.decode(body, codec.Encoding.JSON)
    name = asked.model or asked.name
    if not name:
        raise errors.invalid_field("model", "is required")
    return name


def show(listing: Listing, name: str) -> ShownModel:
    """Returns one model, whose name may end with `:latest`, which in Ollama means an untagged model. Raises
    RequestError."""
    model = _find(listing, name)
    features = listing.features.get(model.root, ())
    return ShownModel(
        details=_details(listing, model),
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
    return OllamaModelList(models=[ListedModel(**_listed(listing, one)) for one in listing.models])


def list_running(listing: Listing, name: str = "") -> RunningModelList:
    """Returns the models that a worker has loaded."""
    return RunningModelList(
        models=[
            RunningModel(
                **_listed(listing, one),
                size=_engine_bytes(listing, one),
                expires_at=_NEVER,
                context_length=one.context_length,
            )
            for one in listing.models
            if (one.parent or one.root) not in listing.unloaded
        ]
    )


def pull(listing: Listing, name: str) -> Pulled:
    """Returns success for a model that can be requested. Raises RequestError for others: workers fetch models, at their
    start."""
    try:
        _find(listing, name)
    except errors.RequestError as error:
        told = f"{error.error.message}: models are fetched where workers run (tokenbus pull, tokenbus worker --model)"
        raise errors.request_error(error.error.code, told) from error
    return Pulled()


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
    Resource("/api/show", "One model, in Ollama's form", ShownModel, show, body=ShowBody, model_in=named_model),
    Resource("/api/pull", "Whether a model can be requested", Pulled, pull, body=ShowBody, model_in=named_model),
)
_BY_OPERATORS = "the operators of workers decide which models are served"
REFUSED = (
    RefusedPath("/api/create", ("POST",), f"models are not created here: {_BY_OPERATORS}"),
    RefusedPath("/api/copy", ("POST",), f"models are not copied here: {_BY_OPERATORS} (--served-name, --alias)"),
    RefusedPath("/api/push", ("POST",), "models are not published from here"),
    RefusedPath("/api/delete", ("DELETE",), f"models are not deleted here: {_BY_OPERATORS} (tokenbus unload)"),
    RefusedPath("/api/blobs/{digest}", ("HEAD", "POST"), f"files are not taken here: {_BY_OPERATORS}"),
)


def _find(listing: Listing, name: str) -> Model:
    if all(one.id != name for one in listing.models):
        name = untagged(name)
    return listing.find(name)


def _details(listing: Listing, model: Model) -> Details:
    served = listing.served.get(model.parent or model.root)
    engines = (served.engines or []) if served is not None else []
    return Details(format=engines[0] if len(engines) == 1 else "")


def _engine_bytes(listing: Listing, model: Model) -> int:
    served = listing.served.get(model.parent or model.root)
    return (served.engine_bytes or 0) if served is not None else 0


def _listed(listing: Listing, model: Model) -> dict[str, Any]:
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": _time(model.created),
        "digest": hashlib.sha256(model.root.encode()).hexdigest(),
        "details": _details(listing, model),
    }


def _time(created: int) -> str:
    return datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat().replace("+00:00", "Z")
