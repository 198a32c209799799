"""The models that are listed, in the form of OpenAI's API."""

import msgspec

from tokenbus.gateway.serving.catalog import Listing, Model
from tokenbus.gateway.serving.dialect import Resource


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Model]


RESOURCES = (
    Resource("/v1/models", "The models that are served", ModelList, lambda listing, _: ModelList(data=listing.models)),
    Resource("/v1/models/{model}", "One model", Model, Listing.find),
)
