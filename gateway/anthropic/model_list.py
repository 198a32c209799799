"""Lists models in the form of Anthropic's API."""

import datetime

from tokenbus.gateway.anthropic import schemas
from tokenbus.gateway.serving.catalog import Listing, Model
from tokenbus.gateway.serving.dialect import Resource


def to_page(listing: Listing, name: str = "") -> schemas.ModelPage:
    """Returns the models, which `name` doesn't restrict."""
    found = [to_info(model) for model in listing.models]
    return schemas.ModelPage(
        data=found, first_id=found[0].id if found else None, last_id=found[-1].id if found else None
    )


def to_info(model: Model) -> schemas.ModelInfo:
    """Returns one model."""
    created = datetime.datetime.fromtimestamp(model.created, datetime.UTC)
    return schemas.ModelInfo(
        id=model.id,
        display_name=model.id,
        created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=model.context_length,
        max_tokens=model.context_length,
    )


RESOURCES = (
    Resource("/v1/models", "The models that are served", schemas.ModelPage, to_page),
    Resource("/v1/models/{model}", "One model", schemas.ModelInfo, lambda listing, name: to_info(listing.find(name))),
)
