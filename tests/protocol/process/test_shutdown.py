"""Ctrl-C waits while processes are being started."""

import os
import signal
import socket
import threading

from tokenbus.protocol.process import signals


def test_a_deferred_ctrl_c_comes_once_and_afterwards_whichever_thread_the_system_gives_it_to() -> None:
    came: list[str] = []
    done = threading.Event()
    other = threading.Thread(target=done.wait)  # whose mask lets the signal in, as those of numerical libraries do
    other.start()
    delivered, notices = socket.socketpair()
    delivered.settimeout(30)
    notices.setblocking(False)
    wakeup_fd = signal.set_wakeup_fd(notices.fileno())
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append("interrupt"))
    try:
        with signals.interrupt_deferred():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                delivered.recv(1)  # the other thread may get it late: only then it has come within the block
            came.append("end of the deferral")
        assert came == ["end of the deferral", "interrupt"]
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup_fd)
        delivered.close()
        notices.close()
        done.set()
        other.join()
