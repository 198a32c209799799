"""The messages between an engine and the processes that compile and follow constraints."""

import msgspec

from tokenbus.worker.contract import engine_request


class ChannelMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base class of all messages."""


class Setup(ChannelMessage, frozen=True):
    """Engine to nursery: the model's vocabulary."""

    token_bytes: list[bytes]
    end_token_ids: tuple[int, ...]


class Fork(ChannelMessage, frozen=True):
    """Engine to a process, with a socket attached: make a copy of yourself that listens on it."""


class Born(ChannelMessage, frozen=True):
    """A new process to the engine, with a descriptor attached by which the process can be killed."""


class Compile(ChannelMessage, frozen=True):
    """Engine to a child of the nursery: compile a constraint, and then fork for each sequence."""

    constraint: engine_request.Constraint


class Compiled(ChannelMessage, frozen=True):
    """The constraint is compiled, which took `grown_bytes` of memory."""

    grown_bytes: int


class Failed(ChannelMessage, frozen=True):
    """The constraint can't be compiled, or can't be followed any further."""

    problem: str
    line: int | None = None
    """The faulty line of a Lark grammar, from 1, if known."""


class Begin(ChannelMessage, frozen=True):
    """Engine to a process that follows a sequence: these are its tokens so far."""

    token_ids: list[int]


class Next(ChannelMessage, frozen=True):
    """Engine to a process that follows a sequence: its next token after the forced ones; None asks what follows
    these."""

    token_id: int | None


class MatcherState(ChannelMessage, frozen=True):
    """A process to the engine: the forced tokens, and a mask of the tokens allowed after them, one bit each.

    The mask is empty if a forced token ends the output, or if more tokens may be forced."""

    forced: list[int]
    mask: bytes


class Encode(ChannelMessage, frozen=True):
    """A process to the engine: tokenize a text, and answer with `Encoded`."""

    text: str


class Encoded(ChannelMessage, frozen=True):
    """Engine to a process: the answer to `Encode`."""

    token_ids: list[int]


Command = Setup | Fork | Compile | Begin | Next | Encoded
Report = Born | Compiled | Failed | MatcherState | Encode
