"""Starts Tokenbus's processes by forking one that has imported their modules, as a faster way to execute Python.

Most of the CPU time of a short-lived router, frontend or engine goes into imports. Where a zygote is installed,
`subprocess` asks it for a process instead of executing `python -m MODULE` for the modules below. The zygote does
nothing but import and fork: no thread, event loop, library or device is started before a fork. A forked process
is a child of the caller, as an executed one would be, with a pid, arguments, environment, files and an exit status of
its own, and has a zygote of its own for its children:

    test process ── zygote ··· forks, with CLONE_PARENT, siblings of itself:
                 ├─ worker ── zygote
                 │         └─ engine
                 └─ router ── zygote

Whatever a fork can't reproduce is executed: another interpreter flag, `preexec_fn`, or environment of libraries that
were loaded already."""

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import platform
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import tokenbus.protocol.process.lean_imports  # noqa: F401  # before structlog, as these processes do
from tokenbus.protocol.process.parent import die_with_parent, end_with_parent

_PARENTS = ("tokenbus.cli.start", "tokenbus.worker.engine.process.main")
_LEAVES = ("tokenbus.protocol.prompt.renderer_process", "tokenbus.worker.engine.constraints.nursery")
"""Modules whose processes execute nothing themselves."""
_PRELOADED = (
    "uvloop",
    *("tokenbus.cli.main", "tokenbus.router.serve", "tokenbus.worker.serve", "tokenbus.gateway.serve"),
    *("tokenbus.auth.serve", "tokenbus.worker.engine.gguf.runner"),
)
_READ_AT_START = ("GGML_", "GOMP_", "HOME", "LANG", "LC_", "LD_", "OMP_", "PYTHON", "XDG_CACHE_")
"""Prefixes of variables that the interpreter or a library reads when it is loaded."""
_HUB = ["huggingface_hub", "huggingface_hub.constants"]
"""What of this library is loaded by then. The second has read variables: each process reads its own."""
_PYTHON = sys.executable  # which a test may replace later
_ROOT = Path(__file__).parents[2]
_MAX_REQUEST_BYTES = 1 << 18
_MAX_FDS = 64
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS = 40
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())

_execute = subprocess._fork_exec  # type: ignore[attr-defined]
_libc = ctypes.PyDLL(None)  # keeps the GIL during a call


class Request(NamedTuple):
    """A process to start. Its file descriptors are sent along; `fds` are the numbers that they have in the process."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    fds: list[int]
    signal_mask: list[int]
    new_session: bool
    preexec: str
    """The name of one of `_PREEXEC`, or nothing."""


class Zygote:
    """A running zygote, seen from its parent."""

    def __init__(self, control: socket.socket, environment: Mapping[str, str]) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._variables = _read_at_start(environment)

    def has(self, environment: dict[str, str]) -> bool:
        """Whether a process that reads this environment when it starts would have found the same."""
        return _read_at_start(environment) == self._variables

    def start(self, request: Request, fds: list[int]) -> int:
        """Starts a process and returns its pid."""
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], fds)
            return int(self._control.recv(16))


def own_terminal() -> None:
    """Makes standard input the terminal of this process's session, from which Ctrl-C and Ctrl-Z come."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


_PREEXEC = {function.__name__: function for function in (end_with_parent, own_terminal)}


def install() -> None:
    """Lets `subprocess` fork processes from now on. The zygote starts with the first of them."""
    if sys.platform == "linux" and _SYS_CLONE is not None:
        _use(None)


@contextlib.contextmanager
def uninstalled() -> Iterator[None]:
    """Lets `subprocess` execute all processes within the block."""
    forking = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = _execute  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = forking  # type: ignore[attr-defined]


def _use(zygote: Zygote | None) -> None:
    now = dict(os.environ)  # of a test process, before a test changes it

    def fork_or_execute(*call: Any) -> int:
        """Takes the arguments of `_posixsubprocess.fork_exec`."""
        nonlocal zygote
        arguments, close_fds, kept_fds, folder, variables = call[0], *call[2:6]
        standard, failure_fd, new_session, preexec_fn = (call[6], call[9], call[11]), call[13], bool(call[15]), call[21]
        pass_fds = [fd for fd in kept_fds if fd != failure_fd]
        words = [os.fsdecode(word) for word in arguments]
        environment = dict(os.environ) if variables is None else dict(_split(os.fsdecode(pair)) for pair in variables)
        module = _module(words)
        if module not in (*_PARENTS, *_LEAVES) or not close_fds or preexec_fn not in (None, *_PREEXEC.values()):
            return int(_execute(*call))
        if zygote is None and threading.current_thread() is threading.main_thread():  # see `parent`
            zygote = _executed(now)
        if zygote is None or not zygote.has(environment):
            return int(_execute(*call))
        request = Request(
            words[words.index(module) :],
            environment,
            os.getcwd() if folder is None else os.fsdecode(folder),
            [0, 1, 2, *pass_fds],
            [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            new_session,
            "" if preexec_fn is None else preexec_fn.__name__,
        )
        inherited = [own if given == -1 else given for own, given in enumerate(standard)]
        return zygote.start(request, [*inherited, *pass_fds])

    subprocess._fork_exec = fork_or_execute  # type: ignore[attr-defined]


class AwaitedProcess:
    """A process of `subprocess` in the place of one of asyncio's. A loop of uvloop would execute that itself."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.pid = process.pid
        self.send_signal, self.terminate, self.kill = process.send_signal, process.terminate, process.kill
        self._process = process
        self._ended = asyncio.Event()
        self._end = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._end, self._reap)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end)
        os.close(self._end)
        self._process.wait()
        self._ended.set()


def _await_processes() -> None:
    """Lets asyncio fork processes, too, where its loop is uvloop's."""
    execute = asyncio.create_subprocess_exec

    async def fork_or_execute(*words: str, **options: Any) -> Any:
        has_pipes = subprocess.PIPE in [options.get(name) for name in ("stdin", "stdout", "stderr")]
        if has_pipes or isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
            return await execute(*words, **options)
        return AwaitedProcess(subprocess.Popen(words, **options))

    asyncio.create_subprocess_exec = fork_or_execute  # type: ignore[assignment]


def _module(words: list[str]) -> str | None:
    """Returns the module that a command executes; its own folder is on the module path, with `-P` or without."""
    match words:
        case [python, "-m", module, *_] | [python, "-P", "-m", module, *_] if python == _PYTHON:
            return module
    return None


def _split(variable: str) -> tuple[str, str]:
    name, _, value = variable.partition("=")
    return name, value


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_AT_START) and name != "PYTHONPATH"
    }


def _executed(environment: dict[str, str]) -> Zygote:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, uninstalled():
        room = " " * 4096  # for the arguments of the processes, which are written over these
        command = [sys.executable, "-m", "tests.support.zygote", str(theirs.fileno()), room]
        zygote = Zygote(ours, environment)
        # Without other threads of BLAS, which a fork would lack. So processes have one, whatever they ask for.
        environment = environment | {"OPENBLAS_NUM_THREADS": "1"}
        child = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, cwd=_ROOT
        )
    atexit.register(_end, ours, child)
    return zygote


def _end(control: socket.socket, child: "subprocess.Popen[bytes]") -> None:
    control.close()
    child.wait()


def _preload() -> None:
    commands = importlib.import_module("tokenbus.cli.commands")
    named = [f"{commands.__name__}.{module.name}" for module in pkgutil.iter_modules(commands.__path__)]
    for name in (*_PARENTS, *_LEAVES, *_PRELOADED, *named):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a module starts a thread when it is imported"
    assert [name for name in sys.modules if name.startswith(_HUB[0])] == _HUB
    gc.collect()
    gc.freeze()


def _serve(control: socket.socket) -> Request:
    """Forks processes until the parent closes the control socket. Returns in each of them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to a whole group is for the others
    # One that reaches a forked process before it has handlers of its own waits until it has: ignored, it would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, _MAX_FDS)
        if not data:
            os._exit(0)
        pid = _fork_sibling()
        if pid == 0:
            control.close()
            request = Request(*json.loads(data))
            _become(request, fds)
            return request
        control.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def _fork_sibling() -> int:
    """Forks a child of the caller's parent; otherwise like `os.fork`."""
    tid_address = ctypes.c_ulong()
    _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid_address))
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD  # glibc's, and the first
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc.syscall(ctypes.c_long(_SYS_CLONE or 0), ctypes.c_long(flags), 0, 0, tid_address, tid_address)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    assert pid >= 0
    return pid


def _become(request: Request, fds: list[int]) -> None:
    """Makes this process what `request` asks for."""
    if request.new_session:
        os.setsid()
    if request.arguments[0] in _PARENTS:
        _have_zygote(request, fds)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.signal_mask)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    _load_when_used(sys.modules[_HUB[1]])
    _place(fds, request.fds)
    if request.preexec:
        _PREEXEC[request.preexec]()
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
    sys.argv = [str(sys.modules[request.arguments[0]].__file__), *request.arguments[1:]]
    _show([sys.executable, "-m", *request.arguments])


def _load_when_used(module: ModuleType) -> None:
    """Lets a module be loaded once more, with the variables of that time, as if it had not been imported before."""

    def load(name: str) -> Any:
        del module.__getattr__
        importlib.reload(module)
        return getattr(module, name)

    for name in [name for name in vars(module) if not name.startswith("__")]:
        delattr(module, name)
    module.__getattr__ = load  # type: ignore[method-assign]


def _have_zygote(request: Request, fds: list[int]) -> None:
    """Forks a zygote for this process's own children."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        die_with_parent()
        ours.close()
        for fd in fds:
            os.close(fd)
        _run(_serve(theirs))
    theirs.close()
    control = socket.socket(fileno=_above(ours.detach(), [*request.fds, *fds]))
    _use(Zygote(control, request.environment))
    _await_processes()


def _place(fds: list[int], numbers: list[int]) -> None:
    """Gives each descriptor its number."""
    above = [_above(fd, [*numbers, *fds]) for fd in fds]
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _above(fd: int, numbers: list[int]) -> int:
    """Moves a descriptor above these numbers."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1)
    os.close(fd)
    return moved


def _stream(fd: int, mode: str) -> io.TextIOWrapper:
    errors = "backslashreplace" if fd == 2 else "strict"
    stream = open(fd, mode, buffering=-1, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
    assert isinstance(stream, io.TextIOWrapper)
    stream.reconfigure(line_buffering=fd == 2 or stream.isatty())
    return stream


def _show(words: list[str]) -> None:
    """Makes the kernel show these as the arguments of this process."""
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _run(request: Request) -> None:
    """Runs the module's `main` and ends the process as the interpreter would."""
    status = 0
    try:
        sys.modules[request.arguments[0]].main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    _preload()
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
