"""Ctrl-C waits while processes are being started."""

import os
import signal
import threading

from tokenbus.protocol.process import shutdown


def test_a_deferred_ctrl_c_comes_once_and_afterwards_whichever_thread_the_system_gives_it_to() -> None:
    came: list[str] = []
    done = threading.Event()
    other = threading.Thread(target=done.wait)  # whose mask lets the signal in, as those of numerical libraries do
    other.start()
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append("interrupt"))
    try:
        with shutdown.interrupt_deferred():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            came.append("end of the deferral")
        assert came == ["end of the deferral", "interrupt"]
    finally:
        signal.signal(signal.SIGINT, before)
        done.set()
        other.join()
