"""The page about fields of other servers says what the gateway does with each of them."""

import pytest

from tools import fields_page

PATHS = pytest.mark.parametrize("path", fields_page.KNOWN)


def test_the_page_is_up_to_date() -> None:
    source = (fields_page.FOLDER / "fields.in.md").read_text()
    assert fields_page.TARGET.read_text() == fields_page.render(source), "run python -m tools.fields_page"


def test_the_fields_of_every_body_are_listed() -> None:
    listed = tuple(fields_page.ENDPOINTS[path].body for path in fields_page.KNOWN)
    asked = [one for one in fields_page.ENDPOINTS.values() if one.method == "POST"]
    assert [one.path for one in asked if not issubclass(one.body, listed)] == []


@PATHS
def test_every_known_field_is_either_served_or_refused_or_ignored(path: str) -> None:
    fates = {name: fields_page.fates_of(path, name) for name in fields_page.servers_of(path)}
    assert {name: found for name, found in fates.items() if len(found) != 1} == {}


@PATHS
def test_every_field_of_the_endpoint_is_known_to_some_server(path: str) -> None:
    assert fields_page.fields_of(path) == fields_page.servers_of(path).keys()
