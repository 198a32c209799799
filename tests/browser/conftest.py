from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.system import System


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    """A system with only a broker; the test starts what is to fail."""
    system = await System.start(tmp_path)
    yield system
    await system.stop()
