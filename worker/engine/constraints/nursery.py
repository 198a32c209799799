"""The process from which constraints' own processes are forked:

    nursery      has the model's vocabulary, and compiles nothing
      template   has compiled one constraint, within limits, or died trying
        follower   follows one sequence through that constraint

A process ends when the engine closes its socket. Everything it computes has a limit of CPU time and memory, at which
the kernel kills it: nothing else could stop llguidance in the middle of a call. Each has a single thread, so forks are
safe, and nothing of the model, so they are quick."""

import gc
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Collection
from pathlib import Path

import msgspec

from tokenbus.protocol.process.memory import resident_bytes
from tokenbus.worker.engine.constraints import messages
from tokenbus.worker.engine.constraints.compiler import ConstraintCompiler, ModelTokens
from tokenbus.worker.engine.constraints.grammar import ConstraintError
from tokenbus.worker.engine.constraints.matcher import MAX_SLOW_S, Matcher
from tokenbus.worker.engine.constraints.messages import Channel

MAX_COMPILE_S = 2.0
MAX_COMPILE_BYTES = 192 << 20
"""Address space of a template beyond that of the nursery."""
MAX_FOLLOW_BYTES = 64 << 20
"""Address space of a follower beyond that of its template."""
STALL_S = 30.0
"""Wall-clock time that a process may take for work with a CPU time limit."""
_MAX_FORCED = 32
_COMMANDS: msgspec.msgpack.Decoder[messages.Command] = msgspec.msgpack.Decoder(messages.Command)

Commands = Channel[messages.Command]


class _Tokenizer:
    """A proxy for the model's tokenizer in the engine. The nursery itself gets no answers, but needs no real tokens."""

    def __init__(self) -> None:
        self.channel: Commands | None = None

    def encode(self, text: str) -> list[int]:
        if self.channel is None:
            return []
        try:
            self.channel.send(messages.Encode(text))
            answer = self.channel.receive()
        except EOFError:  # here it would cause a panic in llguidance, which calls this
            os._exit(0)
        assert isinstance(answer, messages.Encoded), answer
        return answer.token_ids


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    nursery = Channel(socket.socket(fileno=int(sys.argv[1])), _COMMANDS)
    setup = nursery.receive()
    assert isinstance(setup, messages.Setup), setup
    tokenizer = _Tokenizer()
    compiler = ConstraintCompiler(ModelTokens(setup.token_bytes, setup.end_token_ids, tokenizer.encode))
    compiler.prepare()
    gc.collect()
    gc.freeze()  # so that garbage collection in forks does not write to shared pages
    template = tokenizer.channel = _fork(nursery)
    matcher = _compile(template, compiler)
    follower = tokenizer.channel = _fork(template)
    _follow(follower, matcher, setup.end_token_ids)


def _fork(parent: Commands) -> Commands:
    """Forks whenever the engine requests it, and returns only in the forks, with the channel of each."""
    while isinstance(parent.receive(), messages.Fork):
        sock = socket.socket(fileno=parent.take_descriptor())
        if not os.fork():
            break
        sock.close()
    parent.release()
    _silence()
    child = Channel(sock, _COMMANDS)
    own = os.pidfd_open(os.getpid())
    child.send(messages.Born(), [own])
    os.close(own)
    return child


def _silence() -> None:
    """Discards what libraries print: they would print a line for each constraint that reaches its limit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _compile(channel: Commands, compiler: ConstraintCompiler) -> Matcher:
    """Compiles a constraint and reports it. If that fails, raises EOFError, which ends the process."""
    command = channel.receive()
    assert isinstance(command, messages.Compile), command
    before = resident_bytes()
    _limit_memory(MAX_COMPILE_BYTES)
    _limit_cpu(MAX_COMPILE_S)
    try:
        matcher = compiler.compile(command.constraint)
    except ConstraintError as error:
        channel.send(messages.Failed(str(error), error.line))
        raise EOFError from error
    _limit_cpu(0)
    channel.send(messages.Compiled(max(0, resident_bytes() - before)))
    return matcher


def _follow(channel: Commands, matcher: Matcher, end_token_ids: Collection[int]) -> None:
    begin = channel.receive()
    assert isinstance(begin, messages.Begin), begin
    _limit_memory(MAX_FOLLOW_BYTES)
    _limit_cpu(MAX_COMPILE_S)
    try:
        for token_id in begin.token_ids:
            matcher.accept(token_id)
        while True:
            channel.send(_state(matcher, end_token_ids))
            _limit_cpu(0)
            command = channel.receive()
            assert isinstance(command, messages.Next), command
            _limit_cpu(2 * MAX_SLOW_S)  # the matcher itself gives up before this, unless it is in the middle of a call
            if command.token_id is not None:
                matcher.accept(command.token_id)
    except ConstraintError as error:
        channel.send(messages.Failed(str(error)))


def _state(matcher: Matcher, end_token_ids: Collection[int]) -> messages.MatcherState:
    forced = matcher.accept_forced(_MAX_FORCED)
    if forced and (len(forced) == _MAX_FORCED or forced[-1] in end_token_ids):
        return messages.MatcherState(forced, b"")
    return messages.MatcherState(forced, matcher.allowed_bits().tobytes())


def _limit_memory(more_bytes: int) -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = now + more_bytes if hard == resource.RLIM_INFINITY else min(now + more_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_cpu(seconds: float) -> None:
    """Makes the kernel kill this process after this much more CPU time; 0 lifts the limit.

    A process that only waits is killed too, somewhat later: out of memory, llguidance may hang forever."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, STALL_S if seconds else 0)


if __name__ == "__main__":
    with_tracebacks = os.fdopen(os.dup(2), "w")
    try:
        main()
    except (EOFError, MemoryError):  # the engine has closed its end, or notices that this process has ended
        pass
    except BaseException:  # outermost frame
        traceback.print_exc(file=with_tracebacks)
        with_tracebacks.flush()
    finally:
        os._exit(0)  # in a fork too, skipping the cleanup inherited from the nursery
