"""Lists the models of a system, asking a router at most once a second for all clients."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from tokenbus.gateway.admission.aliases import Aliases
from tokenbus.protocol.shared_answer import SharedAnswer
from tokenbus.protocol.wire import errors, limits, messages

_MAX_NAME = 128
_LAST_S = 253_402_300_799
"""The last second of the year 9999. Workers may say of themselves that they are born later, which dates can't."""


# In the form of OpenAI's API; those of other APIs are made from it.
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

    def find(self, name: str) -> Model:
        """Returns one model, or raises the RequestError that a request for it would get."""
        for model in self.models:
            if model.id == name:
                return model
        if self.unserved is None or name in self.unserved:
            raise errors.request_error(errors.Code.NO_WORKER, f"nothing serves {name[:_MAX_NAME]!r} now")
        raise errors.request_error(errors.Code.MODEL_NOT_FOUND, f"no worker has ever served {name[:_MAX_NAME]!r}")

    def with_aliases(self, aliases: Aliases) -> "Listing":
        """Returns the listing with the served aliases after the models."""
        models = {model.id: model for model in self.models}
        served = aliases.served({name: model.context_length for name, model in models.items()})
        named = [msgspec.structs.replace(models[model], id=alias) for alias, model in served.items()]
        return self._replace(models=[*self.models, *named])


NO_MODELS = Listing([], None)


class Catalog:
    """A listing of the models that is at most a second old; all who ask meanwhile share a router's answer."""

    def __init__(
        self, ask: Callable[[], Awaitable[messages.ModelsReply]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ask` sends a `models` request and may raise RequestError."""
        self._ask = ask
        self._listing = SharedAnswer(self._fetch, clock)

    def __repr__(self) -> str:
        return f"<Catalog {self._listing}>"

    async def listing(self) -> Listing:
        """Returns the current listing. Raises RequestError if no router answers."""
        return await self._listing.get()

    async def _fetch(self) -> Listing:
        reply = await self._ask()
        unserved = None if reply.unserved is UNSET else frozenset(reply.unserved)
        features = {served.model: served.features for served in reply.models}
        return Listing(
            [model for served in reply.models for model in models_of(served)],
            unserved,
            features,
            {served.model: served for served in reply.models},
            frozenset(served.model for served in reply.models if served.loadable is True),
        )


def models_of(served: messages.ServedModel) -> list[Model]:
    """Returns a model, followed by its names with each of its adapters."""
    base = Model(
        id=served.model,
        created=min((served.since_ms or 0) // 1_000, _LAST_S),
        root=served.model,
        context_length=served.context_length,
        max_model_len=served.context_length,
    )
    names = [f"{served.model}:{adapter}" for adapter in served.adapters]
    # No request can name an adapter if the two names together are too long.
    short = [name for name in names if len(name.encode()) <= limits.MAX_NAME_BYTES]
    return [base, *(msgspec.structs.replace(base, id=name, parent=base.id) for name in short)]
