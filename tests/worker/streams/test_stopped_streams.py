"""An operator stops a stream: it ends at once with what was generated, and exactly once."""

from collections.abc import Iterator

import pytest

from tests.sim.stage import KEY, NAMES, Stage
from tests.sim.system import MODEL
from tests.sim.world import world
from tokenbus.protocol.wire import codec, internal, messages

SHUTDOWN = messages.StoppedBy.SHUTDOWN


@pytest.fixture
def stage() -> Iterator[Stage]:
    with world(seed=5) as made:
        stage = Stage(made)
        stage.overhear(NAMES.router("peer"), internal.GuardCheck)
        yield stage
        for process in made.processes:
            assert process.faults == [], process


def stop(stage: Stage, key: str | None = KEY) -> internal.ControlReply:
    answer = stage.peer.ask(NAMES.worker(MODEL, "w0", "control"), internal.Control(op="stop", request_id=key))
    assert answer is not None
    return codec.Decoder(internal.ControlReply).decode(answer)


def ends(stage: Stage) -> list[messages.Chunk]:
    return [chunk for chunk in stage.peer.chunks if chunk.finish_reason is not None]


def test_a_stopped_stream_ends_with_what_was_generated_and_says_who_has_stopped_it(stage: Stage) -> None:
    entries = stage.overhear(NAMES.events(MODEL, "w0"), internal.Events)
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    assert stop(stage).ok
    stage.world.run(3.0)
    [terminal] = ends(stage)
    heard = [token for chunk in stage.peer.chunks for token in chunk.token_ids or []]
    assert (terminal.finish_reason, terminal.stopped_by) == ("length", "operator")
    assert terminal.usage
    assert terminal.usage.completion_tokens == len(heard) > 3
    assert [key for entry in entries for key in entry.finished] == [KEY]
    assert [key for entry in entries for key in entry.failed] == []
    assert stage.frontend.engine is not None
    assert stage.frontend.engine.load().running == 0


def test_a_stream_can_be_stopped_before_its_first_token(stage: Stage) -> None:
    stage.run(max_tokens=90)
    assert stop(stage).ok
    stage.world.run(1.0)
    [terminal] = ends(stage)
    assert (terminal.finish_reason, terminal.stopped_by, terminal.offset) == ("length", "operator", 0)


def test_the_end_of_a_stopped_stream_can_be_asked_for_again(stage: Stage) -> None:
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    assert stop(stage).ok
    stage.world.run(1.0)
    assert stage.resync(0) is not None
    stage.world.run(0.1)
    first, again = ends(stage)
    assert first == again


@pytest.mark.parametrize("key", ["default:other", "acme:r1"])
def test_a_request_that_is_not_there_is_refused_by_name(stage: Stage, key: str) -> None:
    """The id of another tenant's request is another request."""
    stage.run(max_tokens=90)
    stage.world.run(0.2)
    refused = stop(stage, key)
    assert not refused.ok
    assert refused.error
    assert (refused.error.code, refused.error.param) == ("invalid_request", "request_id")
    stage.world.run(0.1)
    assert ends(stage) == []


@pytest.mark.parametrize("key", [None, "", "r1", "default:", "default:a b", "=zz:r1", ":r1", "default:r1:x"])
def test_what_names_no_request_is_refused_by_the_field(stage: Stage, key: str | None) -> None:
    refused = stop(stage, key)
    assert refused.error
    assert (refused.ok, refused.error.code, refused.error.param) == (False, "invalid_request", "request_id")


def test_a_stream_is_stopped_once(stage: Stage) -> None:
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    assert [stop(stage).ok, stop(stage).ok] == [True, False]
    stage.world.run(1.0)
    assert len(ends(stage)) == 1


def test_a_stop_is_not_remembered_for_a_request_that_comes_later(stage: Stage) -> None:
    assert not stop(stage).ok
    assert stage.run(max_tokens=5).accepted
    stage.world.run(1.0)
    assert [(one.finish_reason, one.stopped_by or None) for one in ends(stage)] == [("length", None)]


def test_a_stream_whose_engine_is_just_being_replaced_can_be_stopped(stage: Stage) -> None:
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    stage.frontend.process.call(stage.frontend.frontend.engine_died)
    stage.world.run(0.01)
    assert stop(stage).ok
    stage.world.run(1.0)
    assert [one.stopped_by for one in ends(stage)] == ["operator"]


def test_a_stream_that_was_taken_is_not_there_to_be_stopped(stage: Stage) -> None:
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    stage.start_leaving()
    taken = stage.take()
    assert taken
    assert taken.ok
    assert not stop(stage).ok
    stage.world.run(1.0)
    assert ends(stage) == []


# The end that a worker leaves for a stream that a router takes


def test_a_take_brings_the_end_for_a_stream_that_nobody_continues(stage: Stage) -> None:
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    stage.start_leaving()
    taken = stage.take()
    assert taken
    assert taken.last_words
    words = taken.last_words
    assert (words.finish_reason, words.stopped_by, words.offset) == ("length", SHUTDOWN, taken.num_tokens)
    assert words.usage
    assert words.usage.completion_tokens == taken.num_tokens > 3
    assert stage.take() == taken


def test_a_stream_without_a_token_is_taken_without_an_end(stage: Stage) -> None:
    """Its client does better to ask again."""
    stage.run(max_tokens=90)
    stage.start_leaving()
    taken = stage.take()
    assert taken
    assert (taken.ok, taken.num_tokens, taken.last_words) == (True, 0, None)


# Shutdown


@pytest.mark.parametrize(("unguarded_only", "num_ends"), [(False, 1), (True, 0)])
def test_a_shutdown_stops_the_streams_that_nobody_can_continue(
    stage: Stage, unguarded_only: bool, num_ends: int
) -> None:
    streams = stage.frontend.frontend.streams
    stage.run(max_tokens=90)
    stage.world.run(0.55)
    stage.run(name="r2", max_tokens=90)
    stage.frontend.process.call(lambda: streams.stop_begun(unguarded_only=unguarded_only))
    stage.world.run(0.05)
    assert [one.stopped_by for one in ends(stage)] == [SHUTDOWN] * num_ends
    assert len(streams) == 2 - num_ends
