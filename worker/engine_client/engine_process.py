"""Starts the engine process, opens replicas in it, and connects to each over its own socket."""

import asyncio
import contextlib
import dataclasses
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType

from tokenbus.protocol import tasks
from tokenbus.protocol.process.child_environment import child_environment
from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import waiting
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.engine_faults import CrashAttribution

_MALLOC = "GLIBC_TUNABLES"
"""With `hugetlb=1` glibc puts weights into huge pages, if the system leaves that to the process: a step of a model of
0.5B parameters in F32 takes 83 ms of CPU instead of 87 to 99. A value that the user has set is kept."""
_CLOSE_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 1_800.0
"""An engine that loads reports how far it is. One that reports nothing for so long hangs: onnxruntime, which reports
nothing, takes a quarter of an hour for 40 GB of weights on a slow disk."""
_RECEIVE_BYTES = 256 * 1024


class EngineDiedError(RuntimeError):
    """The engine process ended while a replica was starting; another start may help."""


class DeviceFailedError(EngineDiedError):
    """The device failed while a replica was starting; its process goes on."""


@dataclasses.dataclass(eq=False)
class EngineLink:
    """A replica's step loop at the other end of a socket."""

    sock: socket.socket
    pid: int
    crash_attribution: CrashAttribution
    """Shared by all replicas of the process."""
    kill: Callable[[], None]
    """Kills the process at once, with every replica in it. Safe to call again."""
    wait: Callable[[], Awaitable[str]]
    """Waits until the other side has ended, as it does when the socket is closed; returns how."""
    number: int = 0
    """The replica's number in the process."""
    catch_up: Callable[[], None] = lambda: None
    """Takes what the process has reported and was not read yet."""


class EngineConnection(asyncio.Protocol):
    """The socket to one engine, from its start to its end. Hands every report on, except those about its start."""

    def __init__(
        self,
        link: EngineLink,
        on_report: Callable[[ipc.Report], None],
        on_lost: Callable[[], None],
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        """`on_lost` is called once, after the last report."""
        self.link = link
        self._load_timeout_s = load_timeout_s
        self._has_progressed = False
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[ipc.Ready] = loop.create_future()
        self.death: asyncio.Future[str] = loop.create_future()
        self._on_report = on_report
        self._on_lost = on_lost
        self._frame_decoder = ipc.FrameDecoder()
        self._transport: asyncio.Transport | None = None

    def __repr__(self) -> str:
        return f"<EngineConnection to process {self.link.pid}>"

    async def open(self) -> ipc.Ready:
        """Returns once the engine serves. Raises ModelError if the model can't be loaded, or if the engine hangs while
        it loads it and is killed for that; EngineDiedError if the process died."""
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=self.link.sock)
        try:
            while not (await asyncio.wait([self.ready], timeout=self._load_timeout_s))[0]:
                if not self._has_progressed:
                    self.link.kill()
                    problem = f"it reported no progress in {self._load_timeout_s:g} s"
                    raise ModelError(f"the engine hung while it loaded the model, and was killed: {problem}")
                self._has_progressed = False
            return self.ready.result()
        finally:
            self.ready.cancel()

    def write(self, command: bytes) -> None:
        assert self._transport is not None, self
        self._transport.write(command)

    async def close(self) -> str:
        """Ends the replica, and returns how it ended. Safe to call again."""
        if self._transport is not None:
            self._transport.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                return await self.link.wait()
        except TimeoutError:
            self.link.kill()
            return "the engine process did not end, and was killed"

    def data_received(self, data: bytes) -> None:
        for body in self._frame_decoder.feed(data):
            report = ipc.report_decoder.decode(body)
            if isinstance(report, ipc.Ready | ipc.LoadFailed):
                self.link.crash_attribution.load_ended(self.link.number)
            match report:
                case ipc.Ready() | ipc.LoadFailed() if self.ready.done():
                    pass  # nobody waits any more
                case ipc.Ready() as ready:
                    self.ready.set_result(ready)
                case ipc.LoadFailed() as failed:
                    self.ready.set_exception(_error_of(failed))
                case _:
                    self._has_progressed |= isinstance(report, ipc.Loading)
                    self._on_report(report)

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            if isinstance(exc, OSError):  # a write failed, perhaps before all reports were read
                with contextlib.suppress(OSError):
                    while data := self.link.sock.recv(_RECEIVE_BYTES):
                        self.data_received(data)
        finally:  # even if a report can't be taken: else nobody would learn that the engine is lost
            if not self.ready.done():
                self.ready.set_exception(EngineDiedError("the engine process ended while it was starting"))
            self.death.set_result("the engine process closed its socket")
            self._on_lost()


def _error_of(failed: ipc.LoadFailed) -> ModelError | EngineDiedError:
    if failed.may_pass:
        return DeviceFailedError(failed.message)
    return ModelTooLargeError(failed.message) if failed.is_too_large else ModelError(failed.message)


class EngineProcess:
    """The engine process of a frontend. It runs while it has replicas, and can't outlive the frontend."""

    def __init__(self, variables: Mapping[str, str] = MappingProxyType({}), *, is_trial: bool = False) -> None:
        """`variables` are added to the environment that the frontend passes on. `is_trial`: it may take most of the
        memory that is free now, and is the first to end if there is none left."""
        self._variables = variables
        self._is_trial = is_trial
        self._running: _Running | None = None
        self._starting = asyncio.Lock()
        self._last_number = 0

    def __repr__(self) -> str:
        return f"<EngineProcess {self._running!r}>"

    def kill(self) -> None:
        """Kills the process if it runs, with every replica in it."""
        if self._running is not None:
            self._running.kill()

    async def end(self) -> None:
        """Kills the process if it runs, and returns once it is gone and its memory is free. One that the system can't
        end, as it waits for a disk, is waited for a few seconds only."""
        if self._running is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._running.end()

    async def open(
        self, settings: EngineSettings, memory_fd: int | None = None, *, has_served: bool = True
    ) -> EngineLink:
        """Loads a replica, in a new process if none is running. `memory_fd` is a file for its copies of blocks.
        `has_served`: its model was loaded before, so that loading it is not what ends the process.

        Raises EngineDiedError."""
        async with self._starting:
            # a process without replicas is about to exit and would lose this one
            if self._running is not None and self._running.is_ending:
                # two processes must never write to the same file
                await self._running.end()
                self._running = None
            self._last_number += 1
            try:
                if self._running is None:
                    self._running = await _start(self._variables, is_trial=self._is_trial)
                return self._running.open(self._last_number, settings, memory_fd, has_served=has_served)
            except OSError as error:  # too little memory, or too many processes or files, which may pass
                raise EngineDiedError(f"no engine process can be started: {error}") from error


class _Running:
    """One run of the process, from its start to its exit."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._frame_decoder = ipc.FrameDecoder()
        self._closed: dict[int, asyncio.Future[str]] = {}
        self._exit_message = ""
        self._is_killed = False
        self._end = tasks.awaited(self._until_ended())
        self.pid = process.pid
        self.crash_attribution = CrashAttribution()
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control.fileno(), self._read_control)

    def __repr__(self) -> str:
        return f"<process {self.pid} with {len(self._closed)} replicas>"

    @property
    def is_ending(self) -> bool:
        """Whether it has ended or is about to, because it was killed or no replica is left."""
        return self._end.done() or self._is_killed or not self._closed

    async def end(self) -> None:
        """Kills the process if it runs, and returns once it is gone."""
        self.kill()
        await asyncio.shield(self._end)

    def open(self, number: int, settings: EngineSettings, memory_fd: int | None, *, has_served: bool) -> EngineLink:
        ours, theirs = socket.socketpair()
        descriptors = [theirs.fileno()] if memory_fd is None else [theirs.fileno(), memory_fd]
        message = ipc.encode(ipc.OpenReplica(number, settings, has_memory=memory_fd is not None))
        try:
            if socket.send_fds(self._control, [message], descriptors) < len(message):
                self.kill()  # it would take what follows for the rest
                raise BlockingIOError("it does not take messages")
        except OSError as error:
            ours.close()
            raise EngineDiedError(f"the engine process {self.pid} can't open a replica: {error}") from error
        finally:
            theirs.close()
        if not has_served:
            self.crash_attribution.will_load(number)
        closed = self._closed[number] = asyncio.get_running_loop().create_future()
        wait = partial(self.wait_closed, closed)
        return EngineLink(ours, self.pid, self.crash_attribution, self.kill, wait, number, self._catch_up)

    def kill(self) -> None:
        self._is_killed = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def wait_closed(self, closed: "asyncio.Future[str]") -> str:
        """Waits until a replica is closed and returns why; with the last one it waits for the process."""
        await asyncio.wait([closed, self._end], return_when=asyncio.FIRST_COMPLETED)
        # closing the last replica ends the process, and how it ended says more
        return await self._end if not self._closed or not closed.done() else closed.result()

    def _catch_up(self) -> None:
        if not self._end.done():
            self._read_control()

    def _read_control(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:  # nothing new
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
        for body in self._frame_decoder.feed(data):
            match ipc.process_message_decoder.decode(body):
                case ipc.LoadBegan(number):
                    self.crash_attribution.load_began(number)
                case ipc.ReplicaClosed(number):
                    self.crash_attribution.load_ended(number)
                    self._closed.pop(number).set_result("the replica was closed")
                case ipc.ExitReason(text):
                    self._exit_message = f": {text}"

    async def _until_ended(self) -> str:
        status = await self._process.wait()
        self._read_control()  # the reason for its exit may still be unread
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        if status < 0:
            return f"engine process {self.pid} was killed by {signal.Signals(-status).name}{self._exit_message}"
        return f"engine process {self.pid} exited with status {status}{self._exit_message}"


def _environment(*, is_trial: bool) -> dict[str, str]:
    """Returns variables that the user may have set otherwise."""
    waits = waiting.ASLEEP if is_trial else waiting.VARIABLES
    return {_MALLOC: "glibc.malloc.hugetlb=1"} | waits


async def _start(variables: Mapping[str, str], *, is_trial: bool) -> _Running:
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tokenbus.worker.engine.process.main",
            str(theirs.fileno()),
            *(["trial"] if is_trial else []),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            # Ctrl-C must reach the frontend only, which then drains
            start_new_session=True,
            env=_environment(is_trial=is_trial) | child_environment(**variables),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return _Running(process, ours)
