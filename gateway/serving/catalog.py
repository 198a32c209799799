"""The models of a system, as the gateway lists them for a caller."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from tokenbus.gateway.admission.aliases import Aliases
from tokenbus.protocol.wire import errors, limits, messages

_MAX_NAME, _MAX_SHOWN = 128, 20
_LAST_S = 253_402_300_799
"""The last second of the year 9999. Workers may say of themselves that they are born later, which dates can't."""


# In the form of OpenAI's API; those of other APIs are made from it.
class MistralCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The abilities of a model, in the words of Mistral's API, whose clients need them."""

    completion_chat: bool = False
    completion_fim: bool = False
    function_calling: bool = False
    reasoning: bool = False


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    """Unix seconds at which the oldest of its workers started."""
    owned_by: str = "tokenbus"
    root: str
    """Not OpenAI's, like all below: the model behind the name, which may be an alias."""
    parent: str | None = None
    """The model that an adapter belongs to."""
    context_length: int
    """The maximum number of tokens of a prompt and its completion together."""
    max_model_len: int
    """The same under the name that vLLM's clients expect."""
    type: str = "base"
    """Mistral's, as is `capabilities`."""
    capabilities: MistralCapabilities = MistralCapabilities()


class Listing(NamedTuple):
    """A router's answer."""

    models: list[Model]
    unserved: frozenset[str] | None
    """Models that used to be served but are not now; None if the router doesn't know."""
    features: Mapping[str, Sequence[str]] = {}
    """The features common to all workers of a model, by model."""
    served: Mapping[str, messages.ServedModel] = {}
    """The same models as the router lists them, without their workers."""
    unloaded: frozenset[str] = frozenset()
    """Models that are loaded only when a request names them."""

    @classmethod
    def of(cls, reply: messages.ModelsReply) -> "Listing":
        return cls(
            [model for served in reply.models for model in models_of(served)],
            None if reply.unserved is UNSET else frozenset(reply.unserved),
            {served.model: served.features for served in reply.models},
            {served.model: served for served in reply.models},
            frozenset(served.model for served in reply.models if served.loadable is True),
        )

    def of_patterns(self, patterns: Sequence[str]) -> "Listing":
        """Returns the listing with only the models, and the adapters, that a key with these patterns may use."""
        if "*" in patterns:
            return self
        allowed = [one for one in self.models if any(fnmatch.fnmatchcase(one.id, pattern) for pattern in patterns)]
        return self._replace(models=allowed)

    def find(self, name: str) -> Model:
        """Returns one model, or raises the RequestError that a request for it would get."""
        for model in self.models:
            if model.id == name:
                return model
        if self.unserved is None or name in self.unserved:
            raise errors.request_error(errors.Code.NO_WORKER, f"nothing serves {name[:_MAX_NAME]!r} now")
        problem = f"no worker has ever served {name[:_MAX_NAME]!r}; {self.names()}"
        raise errors.request_error(errors.Code.MODEL_NOT_FOUND, problem)

    def names(self) -> str:
        """Returns a text with the names that a request may have, for one with another name."""
        names = [one.id for one in self.models]
        rest = [f"{len(names) - _MAX_SHOWN} more"] if len(names) > _MAX_SHOWN else []
        return f"served models: {', '.join([*names[:_MAX_SHOWN], *rest]) or 'nothing'}"

    def with_aliases(self, aliases: Aliases) -> "Listing":
        """Returns the listing with the served aliases after the models."""
        models = {model.id: model for model in self.models}
        served = aliases.served({name: model.context_length for name, model in models.items()})
        named = [msgspec.structs.replace(models[model], id=alias) for alias, model in served.items()]
        return self._replace(models=[*self.models, *named])


NO_MODELS = Listing([], None)


def models_of(served: messages.ServedModel) -> list[Model]:
    """Returns a model, followed by its names with each of its adapters."""
    base = Model(
        id=served.model,
        created=min((served.since_ms or 0) // 1_000, _LAST_S),
        root=served.model,
        context_length=served.context_length,
        max_model_len=served.context_length,
        capabilities=MistralCapabilities(
            completion_chat="chat" in served.features,
            completion_fim="fim" in served.features,
            function_calling="tools" in served.features,
            reasoning="reasoning" in served.features,
        ),
    )
    names = [f"{served.model}:{adapter}" for adapter in served.adapters]
    # No request can name an adapter if the two names together are too long.
    short = [name for name in names if len(name.encode()) <= limits.MAX_NAME_BYTES]
    return [base, *(msgspec.structs.replace(base, id=name, parent=base.id) for name in short)]
