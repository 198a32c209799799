"""Every sequence that may have been in the step that ended an engine process is suspect, and no other."""

from tokenbus.worker.engine_client.engine_faults import CrashAttribution

ONE, OTHER = "one", "other"


def test_every_sequence_is_suspect_at_first() -> None:
    assert CrashAttribution().may_be_caused_by(ONE, 1)
    assert CrashAttribution().may_be_caused_by(OTHER, 2)


def test_an_isolated_sequence_is_the_only_suspect() -> None:
    attribution = CrashAttribution()
    attribution.step_isolated(ONE, 1)
    assert attribution.may_be_caused_by(ONE, 1)
    assert not attribution.may_be_caused_by(ONE, 2)
    assert not attribution.may_be_caused_by(OTHER, 1)


def test_a_step_that_succeeds_ends_the_isolation() -> None:
    attribution = CrashAttribution()
    attribution.step_isolated(ONE, 1)
    attribution.step_succeeded(OTHER, [1])
    assert not attribution.may_be_caused_by(OTHER, 1)
    attribution.step_succeeded(ONE, [1])
    assert attribution.may_be_caused_by(OTHER, 1)


def test_a_stuck_step_makes_its_own_replicas_sequences_suspect() -> None:
    attribution = CrashAttribution()
    attribution.step_stuck(ONE)
    assert attribution.may_be_caused_by(ONE, 1)
    assert not attribution.may_be_caused_by(OTHER, 1)


def test_a_batch_of_inputs_is_suspect_and_the_sequences_beside_it_are_not_in_a_step() -> None:
    attribution = CrashAttribution()
    attribution.batch_changed(ONE, [7, 8], on_probation=False)
    assert attribution.suspect_calls(ONE) == {7, 8}
    assert attribution.suspect_calls(OTHER) == set()
    assert not attribution.may_be_caused_by(ONE, 1)
    assert attribution.may_be_caused_by(OTHER, 1)
    attribution.batch_changed(ONE, [], on_probation=False)
    assert attribution.suspect_calls(ONE) == set()
    assert attribution.may_be_caused_by(ONE, 1)


def test_a_call_on_probation_is_the_only_suspect() -> None:
    attribution = CrashAttribution()
    attribution.batch_changed(OTHER, [3], on_probation=False)
    attribution.batch_changed(ONE, [7], on_probation=True)
    assert attribution.suspect_calls(ONE) == {7}
    assert attribution.suspect_calls(OTHER) == set()
    assert not attribution.may_be_caused_by(OTHER, 1)
    attribution.batch_changed(ONE, [], on_probation=True)
    assert attribution.suspect_calls(OTHER) == {3}


def test_a_stuck_replica_is_the_only_one_whose_batch_is_suspect() -> None:
    attribution = CrashAttribution()
    attribution.batch_changed(ONE, [1], on_probation=False)
    attribution.batch_changed(OTHER, [2], on_probation=False)
    attribution.step_stuck(OTHER)
    assert (attribution.suspect_calls(ONE), attribution.suspect_calls(OTHER)) == (set(), {2})


def test_only_the_suspects_of_a_poisoned_memory_are_blamed_whatever_else_was_computed() -> None:
    attribution = CrashAttribution()
    attribution.step_isolated(ONE, 3)
    attribution.batch_changed(OTHER, [7], on_probation=False)
    attribution.memory_poisoned(ONE, [1, 2])
    assert [attribution.may_be_caused_by(ONE, number) for number in (1, 2, 3)] == [True, True, False]
    assert not attribution.may_be_caused_by(OTHER, 1)
    assert not attribution.suspect_calls(OTHER)


def test_nobody_is_blamed_while_a_model_is_loaded_for_the_first_time() -> None:
    attribution = CrashAttribution()
    attribution.batch_changed(OTHER, [7], on_probation=False)
    attribution.will_load(3)
    attribution.load_began(3)
    assert attribution.may_be_a_load
    assert not attribution.may_be_caused_by(ONE, 1)
    assert not attribution.suspect_calls(OTHER)
    attribution.load_ended(3)
    assert not attribution.may_be_a_load
    assert attribution.may_be_caused_by(ONE, 1)
    assert attribution.suspect_calls(OTHER) == {7}


def test_a_model_that_is_only_downloaded_or_waits_for_its_turn_excuses_nobody() -> None:
    attribution = CrashAttribution()
    attribution.batch_changed(OTHER, [7], on_probation=False)
    attribution.will_load(3)
    assert not attribution.may_be_a_load
    assert attribution.may_be_caused_by(ONE, 1)
    assert attribution.suspect_calls(OTHER) == {7}


def test_a_model_that_has_been_served_or_is_loaded_by_now_excuses_nobody() -> None:
    attribution = CrashAttribution()
    attribution.load_began(2)
    attribution.will_load(3)
    attribution.load_ended(3)
    attribution.load_began(3)
    assert not attribution.may_be_a_load


def test_a_suspect_that_is_tried_out_is_to_blame_whatever_is_loaded_beside_it() -> None:
    attribution = CrashAttribution()
    attribution.will_load(3)
    attribution.load_began(3)
    attribution.step_isolated(ONE, 1)
    assert not attribution.may_be_a_load
    assert attribution.may_be_caused_by(ONE, 1)
    assert not attribution.may_be_caused_by(OTHER, 1)


def test_a_call_that_is_tried_out_is_to_blame_whatever_is_loaded_beside_it() -> None:
    attribution = CrashAttribution()
    attribution.will_load(3)
    attribution.load_began(3)
    attribution.batch_changed(ONE, [7], on_probation=True)
    assert attribution.suspect_calls(ONE) == {7}


def test_a_step_that_never_ends_is_to_blame_whatever_is_loaded_beside_it() -> None:
    attribution = CrashAttribution()
    attribution.will_load(3)
    attribution.load_began(3)
    attribution.step_stuck(ONE)
    assert attribution.may_be_caused_by(ONE, 1)
    assert not attribution.may_be_caused_by(OTHER, 1)
