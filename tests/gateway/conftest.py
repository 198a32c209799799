from collections.abc import Iterator
from typing import Any

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
