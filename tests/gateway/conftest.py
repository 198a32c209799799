from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from tests.support.system import Gateway, running_gateway, running_up, up_with_output


@pytest.fixture(scope="session")
def said() -> Iterator[dict[str, Any]]:
    """A whole system with the demo model, as `make up` starts it, with its metrics shown: what it says of itself."""
    with up_with_output("--workers", "1", "--threads", "1", "--metrics") as said:
        yield said


@pytest.fixture(scope="session")
def base_url(said: dict[str, Any]) -> str:
    return str(said["http"])


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of that system, which checks the type of every field."""
    with openai.OpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture
async def async_client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The same for a test that is a coroutine, without the checks."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def slow_url() -> Iterator[str]:
    """The broker of a system that serves `slow`: a token every 50 ms, without an end of its own. Without a gateway."""
    model = ["--engine", "sim", "--model", "steps-of-50ms", "--served-name", "slow"]
    with running_up("--workers", "1", *model) as url:
        yield url


@pytest.fixture(scope="session")
def slow_gateway(slow_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway of that system, for tests that leave it running."""
    with running_gateway(slow_url, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway
