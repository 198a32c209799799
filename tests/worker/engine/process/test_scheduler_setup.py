"""What is too short to be cached is a setting; by default it depends on how many checkpoints fit in host memory."""

import pytest

from tests.support.arithmetic import ArithmeticRunner, make_config
from tokenbus.worker.contract.contract import CheckpointSizes
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import SchedulerSettings
from tokenbus.worker.engine.process import scheduler_setup


def least(setting: int, sizes: CheckpointSizes | None = None, context_length: int = 4_096) -> int:
    config = make_config(checkpoint_sizes=sizes, context_length=context_length)
    settings = SchedulerSettings(min_prefix_tokens=setting)
    scheduler_setup.check(config, settings)
    return scheduler_setup.make_pool(ArithmeticRunner(config), settings).cache.min_prefix_tokens


def test_by_default_any_prefix_is_cached_in_blocks() -> None:
    assert least(-1) == 0


@pytest.mark.parametrize(("states", "tokens"), [(127, 128), (128, 0)])
def test_by_default_a_short_prefix_takes_no_checkpoint_where_few_fit(states: int, tokens: int) -> None:
    assert least(-1, CheckpointSizes(states << 20, 1 << 20, 100)) == tokens


def test_by_default_the_least_prefix_is_no_more_than_a_quarter_of_the_context() -> None:
    assert least(-1, CheckpointSizes(1, 1, 100), context_length=200) == 50


@pytest.mark.parametrize("setting", [0, 1, 300])
def test_a_setting_holds_for_blocks_and_checkpoints(setting: int) -> None:
    assert least(setting) == least(setting, CheckpointSizes(1, 1, 100)) == setting


@pytest.mark.parametrize("setting", [-2, 4_097])
def test_a_length_that_no_sequence_has_is_refused(setting: int) -> None:
    problem = rf"--min-prefix-tokens must be -1, or 0 to the context length \(4096\), got {setting}"
    with pytest.raises(ModelError, match=problem):
        least(setting)
