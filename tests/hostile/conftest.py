from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.hostile.forged import Stage
from tests.sim.world import world
from tests.support.system import System


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    """A broker; the test starts what it wants to attack."""
    system = await System.start(tmp_path)
    yield system
    await system.stop()


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A simulated router that forged workers speak to."""
    with world(seed=7) as made:
        yield Stage(made)
