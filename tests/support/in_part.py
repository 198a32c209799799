"""Parameters of which `make test` tries some and `make test-long` the others."""

from collections.abc import Iterable

import pytest


def in_part(values: Iterable[object], one_in: int) -> list[object]:
    """Returns parameters of a test of one rule, of which `make test` tries the first of every `one_in`."""
    return [pytest.param(one, marks=pytest.mark.long if at % one_in else ()) for at, one in enumerate(values)]
