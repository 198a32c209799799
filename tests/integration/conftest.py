from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.raw_client import RawClient
from tests.support.system import up_with_output


@pytest.fixture(scope="session")
def said_by_up() -> Iterator[dict[str, Any]]:
    """A whole system with two workers of the demo model, started like by `make up`; its line of JSON."""
    with up_with_output("--workers", "2") as said:
        yield said


@pytest.fixture(scope="session")
def url(said_by_up: dict[str, Any]) -> str:
    """The URL of that system's broker."""
    return str(said_by_up["nats"])


@pytest.fixture
async def bare(url: str) -> AsyncIterator[RawClient]:
    client = await RawClient.connect(url)
    yield client
    await client.close()
