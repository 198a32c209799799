"""Loops step side by side, and one that has the device for itself shares no moment with another."""

import threading

from tokenbus.worker.engine.process.turnstile import Turnstile

_PATIENCE_S = 20.0


def test_two_loops_step_at_the_same_time() -> None:
    turnstile, both = Turnstile(), threading.Barrier(2)

    def live() -> None:
        with turnstile.step():
            both.wait(_PATIENCE_S)

    threads = [threading.Thread(target=live) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
    assert not both.broken


def test_closing_waits_for_the_steps_that_have_begun() -> None:
    turnstile = Turnstile()
    story: list[str] = []
    closed = threading.Event()

    def close() -> None:
        turnstile.close()
        story.append("closed")
        closed.set()

    with turnstile.step():
        thread = threading.Thread(target=close)
        thread.start()
        assert not closed.wait(0.05)
        story.append("stepped")
    assert closed.wait(_PATIENCE_S)
    assert story == ["stepped", "closed"]


def test_nobody_steps_and_nobody_else_closes_while_one_is_alone() -> None:
    turnstile = Turnstile()
    entered: list[str] = []
    turnstile.close()

    def step() -> None:
        with turnstile.step():
            entered.append("step")

    def close() -> None:
        turnstile.close()
        entered.append("close")
        turnstile.open()

    threads = [threading.Thread(target=life) for life in (step, close)]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    assert entered == []
    turnstile.open()
    for thread in threads:
        thread.join(_PATIENCE_S)
    assert sorted(entered) == ["close", "step"]


def test_a_step_that_fails_is_over_too() -> None:
    turnstile = Turnstile()
    try:
        with turnstile.step():
            raise ValueError
    except ValueError:
        turnstile.close()
