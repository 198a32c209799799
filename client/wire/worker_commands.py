"""An operator's commands to workers: sends one to each of several, and collects their replies until each has ended."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from nats.aio.msg import Msg

from tokenbus.protocol.bus import bus
from tokenbus.protocol.wire import codec, errors, internal
from tokenbus.protocol.wire.subjects import Subjects, WorkerAddress

_FIRST_REPLY_S = 5.0
_SILENCE_S = 60.0
"""A worker that loads or fetches a model reports its progress twice a second."""
_REPLY_WHEN_DONE = ("load_adapter", "unload_adapter")
_replies = codec.Decoder(internal.ControlReply)


class WorkerReply(NamedTuple):
    """One reply of one worker, or an error in its place if it does not answer."""

    worker: WorkerAddress
    reply: internal.ControlReply

    @property
    def is_last(self) -> bool:
        """Whether the worker has done what it was told, or will not."""
        return not self.reply.ok or self.reply.progress in (None, 1.0)


class OperatorCommands:
    """One command on its way. Of each worker only the latest reply is kept until it is read."""

    def __init__(
        self,
        connection: bus.Bus,
        names: Subjects,
        inbox: str,
        workers: Sequence[WorkerAddress],
        control: internal.Control,
    ) -> None:
        """`inbox` is the prefix of the reply subjects."""
        self._connection = connection
        self._names = names
        self._inbox = inbox
        self._workers = workers
        self._control = control
        self._latest: dict[int, internal.ControlReply] = {}
        self._has_some = asyncio.Event()

    def __repr__(self) -> str:
        return f"<OperatorCommands {self._control.op} to {len(self._workers)}>"

    async def replies(self) -> AsyncGenerator[WorkerReply, None]:
        """Yields what the workers reply, until each has given its last reply or has been silent for too long. Close it
        if it is left early."""
        subscription = await self._connection.subscribe(f"{self._inbox}.*", self._take)
        try:
            payload = codec.encode(self._control)
            for number, worker in enumerate(self._workers):
                self._connection.publish(
                    self._names.worker(*worker, "control"), payload, reply=f"{self._inbox}.{number}"
                )
            first_s = _SILENCE_S if self._control.op in _REPLY_WHEN_DONE else _FIRST_REPLY_S
            due = dict.fromkeys(range(len(self._workers)), time.monotonic() + first_s)
            while due:
                for number, reply in await self._next(min(due.values())):
                    if number in due:
                        one = WorkerReply(self._workers[number], reply)
                        due[number] = time.monotonic() + _SILENCE_S
                        if one.is_last:
                            del due[number]
                        yield one
                now = time.monotonic()
                for number in [number for number, at in due.items() if at <= now]:
                    del due[number]
                    silent = _error(errors.Code.NO_WORKER, "the worker does not answer")
                    yield WorkerReply(self._workers[number], internal.ControlReply(ok=False, error=silent))
        finally:
            await self._connection.unsubscribe(subscription)

    def permissions_violated(self, words: str) -> None:
        """Ends the commands that the broker forbids."""
        forbidden = words.lower()  # nats-py reports the subject in lower case
        text = f"{words}: this process's NATS user may not command workers (docs/security.md)"
        for number, (model, worker_id) in enumerate(self._workers):
            subject = self._names.worker(model, worker_id, "control")
            if f'"{subject}"'.lower() in forbidden or self._inbox.lower() in forbidden:
                self._note(number, internal.ControlReply(ok=False, error=_error(errors.Code.FORBIDDEN, text)))

    async def _next(self, until: float) -> list[tuple[int, internal.ControlReply]]:
        """Returns the replies that have come, or none at that time."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._has_some.wait()
        except TimeoutError:
            pass
        self._has_some.clear()
        found, self._latest = self._latest, {}
        return list(found.items())

    def _take(self, message: Msg) -> None:
        number = int(message.subject.rpartition(".")[2])
        if bus.is_no_responders(message):
            gone = _error(errors.Code.NO_WORKER, "there is no such worker any more")
            self._note(number, internal.ControlReply(ok=False, error=gone))
            return
        try:
            self._note(number, _replies.decode(message.data))
        except errors.RequestError as error:
            text = f"its reply can't be read: {error.error.message}"
            self._note(number, internal.ControlReply(ok=False, error=_error(errors.Code.INTERNAL, text)))

    def _note(self, number: int, reply: internal.ControlReply) -> None:
        self._latest[number] = reply
        self._has_some.set()


def _error(code: errors.Code, text: str) -> errors.Error:
    return errors.make_error(code, text)
