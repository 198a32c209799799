"""The thread in which a synchronous client lives."""

import threading

from tokenbus.client.errors import RequestCancelledError
from tokenbus.client.loop_thread import LoopThread


class Client:
    async def __aenter__(self) -> None: ...

    async def close(self) -> None: ...


def test_no_call_waits_forever_while_another_thread_closes_the_client() -> None:
    def call_until_closed(loop: LoopThread) -> None:
        try:
            while True:
                loop.call(lambda: None)
        except (RuntimeError, RequestCancelledError):
            return

    for _ in range(20):
        loop = LoopThread.start(Client())  # type: ignore[arg-type]
        callers = [threading.Thread(target=call_until_closed, args=[loop], daemon=True) for _ in range(8)]
        for caller in callers:
            caller.start()
        loop.stop()
        for caller in callers:
            caller.join(5)
        assert not any(caller.is_alive() for caller in callers)
