from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.bare import Bare
from tests.support.system import running_up


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A whole system with two replicas of the demo model, as `make up` starts it."""
    with running_up("--workers", "2") as url:
        yield url


@pytest.fixture
async def bare(url: str) -> AsyncIterator[Bare]:
    client = await Bare.connect(url)
    yield client
    await client.close()
