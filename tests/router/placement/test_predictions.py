"""Placed prompts are predicted to be cached at their workers for a while, and nothing is left of them afterwards."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.router.placement.predictions import PREDICTION_TTL_S, Predictions
from tokenbus.router.placement.prefix_index import MatchLevel

PROMPT = range(10)


def test_a_placed_prompt_is_predicted_in_full() -> None:
    predictions = Predictions()
    predictions.add(2, PROMPT[:6], 0, now=0.0)
    assert predictions.match(PROMPT, []) == {2: 6}
    assert predictions.match(range(50, 60), []) == {}


def test_predictions_extend_what_a_worker_holds() -> None:
    predictions = Predictions()
    predictions.add(2, PROMPT, 4, now=0.0)
    assert predictions.match(PROMPT, [MatchLevel(4, 1 << 2)]) == {2: 10}
    assert predictions.match(PROMPT, [MatchLevel(7, 1 << 2)]) == {2: 10}, "some of it has come meanwhile"
    assert predictions.match(PROMPT, [MatchLevel(10, 1 << 2)]) == {}


def test_another_prompt_matches_as_far_as_it_has_the_prefix_in_common() -> None:
    predictions = Predictions()
    predictions.add(2, PROMPT, 3, now=0.0)
    for common in range(4, 11):
        assert predictions.match([*PROMPT[:common], 77, 78], [MatchLevel(3, 1 << 2)]) == {2: common}
        assert predictions.match(PROMPT[:common], []) == {2: common}
    assert predictions.match([*PROMPT[:3], 77], [MatchLevel(3, 1 << 2)]) == {}


def test_a_prediction_expires() -> None:
    predictions = Predictions()
    predictions.add(1, PROMPT, 0, now=0.0)
    predictions.add(1, PROMPT, 0, now=3.0)
    predictions.expire(PREDICTION_TTL_S)
    assert predictions.match(PROMPT, []) == {1: 10}
    predictions.expire(3.0 + PREDICTION_TTL_S)
    assert predictions.match(PROMPT, []) == {}
    assert len(predictions) == 0


def test_a_removed_worker_has_no_predictions() -> None:
    predictions = Predictions()
    predictions.add(1, PROMPT, 0, now=0.0)
    predictions.add(2, PROMPT, 0, now=0.0)
    predictions.remove_worker(1)
    assert predictions.match(PROMPT, []) == {2: 10}
    predictions.check_integrity()


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 10), st.integers(0, 10)),
            st.tuples(st.just("tick"), st.floats(0, 4)),
            st.tuples(st.just("leave"), st.integers(0, 3)),
        ),
        max_size=30,
    )
)
def test_the_tables_stay_consistent_over_any_history(history: list[tuple[object, ...]]) -> None:
    predictions, now = Predictions(), 0.0
    for kind, *rest in history:
        if kind == "put":
            row, length, overlap = rest
            predictions.add(row, PROMPT[:length], min(overlap, length), now)  # type: ignore[call-overload, arg-type]
        elif kind == "tick":
            now += rest[0]  # type: ignore[operator]
            predictions.expire(now)
        else:
            predictions.remove_worker(rest[0])  # type: ignore[arg-type]
        predictions.check_integrity()
    predictions.expire(now + PREDICTION_TTL_S)
    assert len(predictions) == 0
