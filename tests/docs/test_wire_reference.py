"""docs/wire.md is what protocol/ says of itself."""

import re

import msgspec
import pytest

from tokenbus.protocol.wire import internal, messages
from tokenbus.protocol.wire.params import GenerationParams
from tools import wire_page


def test_the_reference_is_up_to_date() -> None:
    made = wire_page.render((wire_page.FOLDER / "wire.in.md").read_text())
    assert wire_page.TARGET.read_text() == made, "run python -m tools.wire_page"


@pytest.mark.parametrize(
    "message",
    [
        messages.GenerateRequest,
        messages.Chunk,
        messages.Usage,
        messages.Timings,
        messages.Card,
        messages.Load,
        internal.Run,
        internal.RunReply,
        GenerationParams,
        internal.Events,
        internal.SnapshotPart,
        internal.Control,
    ],
)
def test_every_field_of_a_message_is_in_the_reference_with_its_meaning(message: type[msgspec.Struct]) -> None:
    structs = [kind for kind in message.__mro__ if kind.__module__.startswith("tokenbus.") and kind.__annotations__]
    tables = [wire_page.render(f"{{{{fields {kind.__name__}}}}}") for kind in structs]
    assert all(table in wire_page.TARGET.read_text() for table in tables)
    table = "".join(tables)
    for field in msgspec.structs.fields(message):
        assert re.search(rf"^\| `{field.name}` \| [^|]+ \| [^|]{{5,}}", table, re.MULTILINE), field.name


def test_a_directive_that_names_nothing_is_refused() -> None:
    with pytest.raises(KeyError):
        wire_page.render("{{fields Nothing}}")
    with pytest.raises(KeyError):
        wire_page.render("{{colours}}")
