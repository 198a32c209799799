"""The model that a request means if it names none: the only served one that can do what is asked."""

from collections.abc import Mapping, Sequence

from tokenbus.protocol.wire import errors

_DONE = {"generate": "generates", "embed": "makes embeddings", "rerank": "ranks documents"}
"""The features that a request may need of its model, in words."""
_MAX_NAMES = 10


def default_model(served: Mapping[str, Sequence[str]], feature: str = "") -> str:
    """Returns the default among the served models, given the features of each; `feature` is `generate`, `embed`,
    `rerank`, or empty if every model can do it.

    A model that has not been loaded yet has no features, and might be able to do it. Raises RequestError, which names
    the models if there are several or none of them can do it."""
    able = [name for name, features in served.items() if not feature or not features or feature in features]
    if len(able) == 1:
        return able[0]
    if able:
        raise errors.invalid_field("model", f"is required while several models are served: {_listed(able)}")
    if served:
        problem = f"none of the served models {_DONE[feature]}: {_listed(served)}"
        raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="model")
    raise errors.request_error(errors.Code.NO_WORKER, "no model is being served")


def _listed(names: Sequence[str] | Mapping[str, object]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMES} more" if len(ordered) > _MAX_NAMES else ""
    return ", ".join(ordered[:_MAX_NAMES]) + more
