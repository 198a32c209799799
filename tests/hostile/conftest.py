from collections.abc import Iterator

import pytest

from tests.hostile.forged import Stage
from tests.sim.world import world


@pytest.fixture
def stage() -> Iterator[Stage]:
    with world(seed=7) as made:
        yield Stage(made)
