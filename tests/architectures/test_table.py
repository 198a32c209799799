"""The table of architectures in docs/models.md says what is true; all of it with TOKENBUS_ARCHITECTURES=long."""

import os

import pytest

from tests.architectures import table
from tests.architectures.names import NAMES
from tests.architectures.trial import try_out
from tests.support.in_part import in_part

TRIED = NAMES if os.environ.get("TOKENBUS_ARCHITECTURES") == "long" else ("gemma3", "plamo2", "t5")


def test_every_architecture_has_a_line() -> None:
    assert tuple(table.rows()) == NAMES


@pytest.mark.parametrize("name", in_part(TRIED, 3))
def test_a_tiny_model_of_an_architecture_is_served_as_the_table_says(name: str) -> None:
    assert table.row(name, try_out(name)) == table.rows()[name]
