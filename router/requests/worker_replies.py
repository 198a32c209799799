"""Reads what workers answer. An answer that can't be read is the worker's fault, and never its client's."""

from typing import TypeVar

import msgspec
import structlog

from tokenbus.protocol.wire import codec, errors

AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)


def read(decoder: codec.Decoder[AnswerT], data: bytes, worker_id: str) -> AnswerT:
    """Raises RequestError(internal) for an answer that is malformed, as that of a newer or older worker may be."""
    try:
        return decoder.decode(data)
    except errors.RequestError as problem:
        raise unreadable(worker_id, str(problem)) from problem


def unreadable(worker_id: str, problem: str) -> errors.RequestError:
    """The error of a request whose worker has given an answer that makes no sense; it is logged here."""
    structlog.get_logger().error("worker_reply_refused", worker_id=worker_id, error=problem)
    return errors.request_error(errors.Code.INTERNAL, f"worker {worker_id} gave an answer that can't be read")
