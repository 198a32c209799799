"""Whoever may have been in the step that ended an engine process is blamed, and nobody else."""

from tokenbus.worker.engine_client.crash_attribution import CrashAttribution

ONE, OTHER = "one", "other"


def test_everybody_may_have_done_it() -> None:
    assert CrashAttribution().may_be_caused_by(ONE, 1)
    assert CrashAttribution().may_be_caused_by(OTHER, 2)


def test_only_one_that_was_alone_has_done_it() -> None:
    attribution = CrashAttribution()
    attribution.step_isolated(ONE, 1)
    assert attribution.may_be_caused_by(ONE, 1)
    assert not attribution.may_be_caused_by(ONE, 2)
    assert not attribution.may_be_caused_by(OTHER, 1)


def test_one_that_was_alone_and_got_on_is_one_of_all_again() -> None:
    attribution = CrashAttribution()
    attribution.step_isolated(ONE, 1)
    attribution.step_succeeded(OTHER, 1)
    assert not attribution.may_be_caused_by(OTHER, 1)
    attribution.step_succeeded(ONE, 1)
    assert attribution.may_be_caused_by(OTHER, 1)


def test_a_step_that_never_ends_is_its_own_replicas() -> None:
    attribution = CrashAttribution()
    attribution.step_stuck(ONE)
    assert attribution.may_be_caused_by(ONE, 1)
    assert not attribution.may_be_caused_by(OTHER, 1)
