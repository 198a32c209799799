"""Whoever may have been in the step that ended an engine process is blamed, and nobody else."""

from tokenbus.worker.engine_client.blame import Blame

ONE, OTHER = "one", "other"


def test_everybody_may_have_done_it() -> None:
    assert Blame().may_be_of(ONE, 1)
    assert Blame().may_be_of(OTHER, 2)


def test_only_one_that_was_alone_has_done_it() -> None:
    blame = Blame()
    blame.stepped_alone(ONE, 1)
    assert blame.may_be_of(ONE, 1)
    assert not blame.may_be_of(ONE, 2)
    assert not blame.may_be_of(OTHER, 1)


def test_one_that_was_alone_and_got_on_is_one_of_all_again() -> None:
    blame = Blame()
    blame.stepped_alone(ONE, 1)
    blame.advanced(OTHER, 1)
    assert not blame.may_be_of(OTHER, 1)
    blame.advanced(ONE, 1)
    assert blame.may_be_of(OTHER, 1)


def test_a_step_that_never_ends_is_its_own_replicas() -> None:
    blame = Blame()
    blame.stuck(ONE)
    assert blame.may_be_of(ONE, 1)
    assert not blame.may_be_of(OTHER, 1)
