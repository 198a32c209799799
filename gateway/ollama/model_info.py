"""Describes models as Ollama does: its lists, and one model's capabilities."""

import datetime
import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from tokenbus.gateway.openai import schemas
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


def to_list(models: Sequence[schemas.Model]) -> OllamaModelList:
    """Returns the usable models."""
    return OllamaModelList(models=[_listed(one) for one in models])


def to_running(models: Sequence[schemas.Model]) -> RunningModelList:
    """Returns the models that are loaded: all of them."""
    running = [
        RunningModel(
            name=one.id,
            model=one.id,
            modified_at=_time(one.created),
            digest=_digest(one),
            details=Details(),
            expires_at=_NEVER,
            context_length=one.context_length,
        )
        for one in models
    ]
    return RunningModelList(models=running)


def to_shown(model: schemas.Model, features: Sequence[str]) -> ShownModel:
    """Returns one model, with the features on the cards of all its workers."""
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


def parse_show(body: bytes) -> str:
    """Returns the model name in a body. Raises RequestError."""
    asked = _decoder.decode(body, codec.Encoding.JSON)
    name = asked.model or asked.name
    if not name:
        raise errors.invalid_field("model", "is required")
    return name


def named(name: str, models: Mapping[str, schemas.Model]) -> str:
    """Returns the name without `:latest`, which in Ollama means an untagged model."""
    return name.removesuffix(_LATEST) if name not in models else name


def _listed(model: schemas.Model) -> ListedModel:
    return ListedModel(
        name=model.id,
        model=model.id,
        modified_at=_time(model.created),
        digest=_digest(model),
        details=Details(),
    )


def _digest(model: schemas.Model) -> str:
    return hashlib.sha256(model.root.encode()).hexdigest()


def _time(created: int) -> str:
    return datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat().replace("+00:00", "Z")
