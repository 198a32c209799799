"""Lists models in the form of Anthropic's API."""

import datetime
from collections.abc import Mapping, Sequence

from tokenbus.gateway.anthropic import schemas
from tokenbus.gateway.openai.schemas import Model

_VERSION = "anthropic-version"


def is_wanted(headers: Mapping[str, str]) -> bool:
    """Returns whether a request belongs to Anthropic's API, where several APIs share a path."""
    return _VERSION in headers


def to_page(models: Sequence[Model]) -> schemas.ModelPage:
    found = [to_info(model) for model in models]
    return schemas.ModelPage(
        data=found, first_id=found[0].id if found else None, last_id=found[-1].id if found else None
    )


def to_info(model: Model) -> schemas.ModelInfo:
    created = datetime.datetime.fromtimestamp(model.created, datetime.UTC)
    return schemas.ModelInfo(
        id=model.id,
        display_name=model.id,
        created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=model.context_length,
        max_tokens=model.context_length,
    )
