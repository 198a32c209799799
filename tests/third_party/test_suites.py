"""Nothing that suites and clients of others find wrong is without a reason. `make conformance` runs all of them."""

from collections.abc import Iterator

import pytest

from tests.third_party import packages
from tests.third_party.__main__ import SKIPS
from tests.third_party.judging import judge, read_skips
from tests.third_party.serving import Served, serving
from tests.third_party.suites import SUITES


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("suites")) as served:
        yield served


@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if suite.is_quick])
def test_nothing_fails_without_a_reason(served: Served, name: str) -> None:
    suite = SUITES[name]
    if suite.needs_node and not packages.has_node():
        pytest.skip("needs Node and npm")
    result = judge(suite.run(served), read_skips(SKIPS.read_text()).get(name, []))
    assert not result.problems, "\n".join(result.problems)
