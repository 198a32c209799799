"""Loops step side by side, but never while one of them has the device for itself."""

import threading

from tokenbus.worker.engine.process.device_sharing import StepGate

_PATIENCE_S = 20.0


def test_two_loops_step_at_the_same_time() -> None:
    step_gate, both = StepGate(), threading.Barrier(2)

    def live() -> None:
        with step_gate.step():
            both.wait(_PATIENCE_S)

    threads = [threading.Thread(target=live) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
    assert not both.broken


def test_closing_waits_for_the_steps_that_have_begun() -> None:
    step_gate = StepGate()
    story: list[str] = []
    closed = threading.Event()

    def close() -> None:
        step_gate.close()
        story.append("closed")
        closed.set()

    with step_gate.step():
        thread = threading.Thread(target=close)
        thread.start()
        assert not closed.wait(0.05)
        story.append("stepped")
    assert closed.wait(_PATIENCE_S)
    assert story == ["stepped", "closed"]


def test_nobody_steps_or_closes_while_the_gate_is_closed() -> None:
    step_gate = StepGate()
    entered: list[str] = []
    step_gate.close()

    def step() -> None:
        with step_gate.step():
            entered.append("step")

    def close() -> None:
        step_gate.close()
        entered.append("close")
        step_gate.open()

    threads = [threading.Thread(target=life) for life in (step, close)]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    assert entered == []
    step_gate.open()
    for thread in threads:
        thread.join(_PATIENCE_S)
    assert sorted(entered) == ["close", "step"]


def test_a_step_that_raises_is_over_too() -> None:
    step_gate = StepGate()
    try:
        with step_gate.step():
            raise ValueError
    except ValueError:
        step_gate.close()


def test_a_loop_is_told_whether_others_have_work_and_not_of_its_own() -> None:
    step_gate, one, other = StepGate(), object(), object()
    step_gate.note_work(one, has_work=True)
    assert not step_gate.is_wanted_beside(one)
    assert step_gate.is_wanted_beside(other)
    step_gate.note_work(one, has_work=False)
    assert not step_gate.is_wanted_beside(other)
