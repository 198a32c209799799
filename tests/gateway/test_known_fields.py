"""Each field that any server knows is served, or refused by its name for what it may not be, at every endpoint."""

import json
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.gateway.test_calls import UNNAMED
from tests.support.refusals import refusal_of
from tokenbus.gateway.http.http_errors import ApiError
from tokenbus.gateway.serving.dialect import UnreadRecordsError
from tokenbus.protocol.wire import errors
from tools.fields_page import ENDPOINTS, KNOWN, servers_of

MAX_MESSAGE = 400
ODD: list[Any] = [
    True,
    False,
    0,
    -1,
    7,
    2**31,
    2**64,
    -(2**63),
    0.5,
    1e308,
    "",
    "odd",
    "odd" * 2_000,
    "\x00",
    [],
    ["odd"],
    [7],
    [[]],
    [None],
    [{"odd": 1}],
    {},
    {"odd": 1},
    {"type": "odd"},
    {"7": -1},
]
OBJECTS: dict[str, dict[str, Any]] = {
    "structured_outputs": {"choice": ["a"]},
    "messages[]": {"role": "user", "content": "x"},
    "text.format": {"type": "text"},
}
"""Objects that are valid by themselves, to which a field is added."""
MAX_RECORD_BYTES = 1024
"""The most bytes of one record that may be stored."""


class Place(NamedTuple):
    path: str
    name: str

    def parse(self, value: Any) -> object:
        unnamed = UNNAMED[self.path] | ({"prompt": None} if self.name.startswith("messages[]") else {})
        body = json.dumps({"model": "m"} | unnamed | self._with(value))
        return ENDPOINTS[self.path].parse(body.encode(), {}, "r", "m", {}, MAX_RECORD_BYTES)

    def _with(self, value: Any) -> dict[str, Any]:
        """Returns a body's field with the value in its place."""
        owners = self.name.split(".")
        given: dict[str, Any] = {owners.pop(): value}
        while owners:
            found = OBJECTS.get(".".join(owners), {}) | given
            owner = owners.pop()
            given = {owner.removesuffix("[]"): [found] if owner.endswith("[]") else found}
        return given

    def accepts(self, value: Any) -> bool:
        """Fails unless a value that is not accepted is refused by some name, in few words."""
        try:
            self.parse(value)
        except errors.RequestError as refused:
            error = refused.error
            assert error.code in (errors.Code.INVALID_REQUEST, errors.Code.UNSUPPORTED), error
            assert error.param
            assert len(error.message) < MAX_MESSAGE, error
            return False
        except (ApiError, UnreadRecordsError):
            assert self.name == "previous_response_id"
        return True


PATHS = pytest.mark.parametrize("path", KNOWN)


@PATHS
def test_every_value_of_a_known_field_is_served_or_refused_in_few_words(path: str) -> None:
    endpoint = ENDPOINTS[path]
    read = {field.name for field in msgspec.structs.fields(endpoint.body)} | endpoint.unserved.keys()
    places = {name: Place(path, name) for name in servers_of(path)}
    accepted = {name: sum(map(place.accepts, ODD)) for name, place in places.items()}
    checked = {name for name, number in accepted.items() if number < len(ODD)}
    assert {name for name in checked if "." not in name} == {name for name in places.keys() & read if "." not in name}


@PATHS
def test_what_would_change_an_answer_and_is_not_served_is_refused_by_name(path: str) -> None:
    for name, field in ENDPOINTS[path].unserved.items():
        place = Place(path, name)
        for value in field.harmless:
            place.parse(value)
        numbers = [one for one in field.harmless if isinstance(one, int) and not isinstance(one, bool)]
        for value in ({"other": 1}, "other", 12.5, *([bool(one) for one in numbers if one in (0, 1)])):
            param = refusal_of(lambda place=place, value=value: place.parse(value)).param  # type: ignore[misc]
            assert (param or "").startswith(name.replace("[]", "[0]"))
