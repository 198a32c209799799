"""Checks of one stream's messages, in the order of arrival. Pure."""

from collections.abc import Sequence

from tokenbus.conformance.probing import field_types, schemas
from tokenbus.conformance.probing.assertions import BrokenError, Message, expect, shorten


def current(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages that a client uses: none whose attempt is lower than an earlier one's."""
    kept: list[Message] = []
    highest = 0
    for message in messages:
        attempt = message.get("attempt", 0)
        if attempt >= highest:
            highest = attempt
            kept.append(message)
    return kept


def check_order(messages: Sequence[Message]) -> None:
    """Checks for a head, then chunks, then one terminal, and nothing after it."""
    ends = [number for number, message in enumerate(messages, 1) if message.get("finish_reason") is not None]
    expect(bool(ends), f"no terminal among {len(messages)} messages")
    expect(len(ends) == 1, f"{len(ends)} terminals: messages {ends} of {len(messages)}")
    extra = len(messages) - ends[0]
    expect(extra == 0, f"{extra} messages after the terminal: {shorten(messages[-1])}")
    _check_head(messages)


def _check_head(messages: Sequence[Message]) -> None:
    """Checks the first message that is not a router's empty chunk."""
    head = next(iter(_without_router_s(messages)), messages[-1])
    is_empty = head.get("text") == "" and head.get("tokens") == 0 and head.get("finish_reason") is None
    expect(is_empty and head.get("worker_id") is not None, f"no head before {shorten(head)}")


def _without_router_s(messages: Sequence[Message]) -> list[Message]:
    """Leaves out the empty chunks by which a router says that it holds a request."""
    return [one for one in messages if not _is_routers(one) or one.get("finish_reason") is not None]


def _is_routers(message: Message) -> bool:
    """Whether a router made the message: one that names no worker, although its kind does."""
    return message.get("worker_id", "") is None and not message.get("tokens") and not message.get("text")


def check_fields(messages: Sequence[Message]) -> None:
    """Checks that every message has the fields of its kind."""
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        field_types.check(message, schemas.CHUNK, where)
        is_end = message["finish_reason"] is not None if "finish_reason" in message else False
        if is_end or (message["tokens"] == 0 and message["text"] == "" and message.get("progress") is None):
            # A router's refusal may come before any model is known.
            is_refusal = message.get("error") is not None and message.get("usage") is None
            if not is_refusal:
                field_types.check(message, schemas.ORIGIN, where)
        if is_end:
            _check_end_fields(message)
        else:
            for name in ("usage", "timings", "error", "stop_match", "stopped_by"):
                expect(message.get(name) is None, f"{where} is not a terminal but has {name}")


def _check_end_fields(terminal: Message) -> None:
    reason = terminal["finish_reason"]
    error = terminal.get("error")
    expect((reason == "error") == (error is not None), f"finish_reason {reason} with error {shorten(error)}")
    if error is not None:
        check_error(error)
    if terminal.get("usage") is not None or error is None:
        field_types.check(terminal.get("usage"), schemas.USAGE, "the terminal's usage")
        field_types.check(terminal.get("timings"), schemas.TIMINGS, "the terminal's timings")
    match = terminal.get("stop_match")
    expect((reason == "stop") == (match is not None), f"finish_reason {reason} with stop_match {shorten(match)}")
    expect(
        match is None or field_types.TEXT.holds(match) or field_types.COUNT.holds(match),
        f"stop_match is {shorten(match)}",
    )
    stopped_by = terminal.get("stopped_by")
    expect(
        stopped_by is None or (reason == "length" and stopped_by in schemas.STOPPERS),
        f"finish_reason {reason} with stopped_by {shorten(stopped_by)}",
    )


def check_error(error: object) -> None:
    """Checks an error's fields, and `retryable` against its code."""
    field_types.check(error, schemas.ERROR, "the error")
    assert isinstance(error, dict)
    _, retryable = schemas.ERRORS[error["code"]]
    expect(error["retryable"] is retryable, f"{error['code']} has retryable: {error['retryable']}")


def check_numbers(messages: Sequence[Message]) -> None:
    """Checks that offsets in tokens and in UTF-8 bytes have no gaps, those of reasoning and of arguments included."""
    offset = text_offset = reasoning_offset = 0
    arguments: dict[int, int] = {}
    # Late messages of a lower attempt are not part of the stream.
    for number, message in enumerate(current(messages), 1):
        seen = (message.get("offset"), message.get("text_offset"))
        if _is_routers(message):  # which knows no text, and perhaps not every token
            expect(seen[1] == 0, f"message {number} is a router's and has text_offset {seen[1]} instead of 0")
            continue
        if seen != (offset, text_offset):
            raise BrokenError(f"message {number} has offset, text_offset {seen} instead of {(offset, text_offset)}")
        offset += message["tokens"]
        text_offset += len(message["text"].encode())
        if message.get("reasoning") is not None:
            seen_reasoning = message.get("reasoning_offset")
            expect(seen_reasoning == reasoning_offset, f"reasoning_offset {seen_reasoning}, not {reasoning_offset}")
            reasoning_offset += len(message["reasoning"].encode())
        for delta in message.get("tool_calls") or ():
            _check_delta(delta, arguments)


def _check_delta(delta: object, arguments: dict[int, int]) -> None:
    """Checks a tool-call delta, and adds it to the bytes of arguments that each call has."""
    field_types.check(delta, schemas.TOOL_CALL, "a tool call")
    assert isinstance(delta, dict)
    index = delta["index"]
    if index not in arguments:
        expect(index == len(arguments), f"call {index} begins after {len(arguments)} calls")
        expect(bool(delta.get("id")) and delta.get("type") == "function", f"call {index} begins without id or type")
        expect(bool(delta["function"].get("name")), f"call {index} begins without a name")
    else:
        expect(index == len(arguments) - 1, f"call {index} goes on after call {len(arguments) - 1} has begun")
        expect(delta["function"].get("name") is None, f"call {index} is named twice")
    known = arguments.setdefault(index, 0)
    expect(delta["arguments_offset"] == known, f"arguments_offset {delta['arguments_offset']} instead of {known}")
    arguments[index] += len(delta["function"]["arguments"].encode())


def check_usage(messages: Sequence[Message]) -> None:
    """Checks the terminal's usage against the tokens in the chunks."""
    terminal = messages[-1]
    usage = terminal.get("usage")
    field_types.check(usage, schemas.USAGE, "the terminal's usage")
    assert isinstance(usage, dict)
    counted = terminal["offset"] + terminal["tokens"]
    expect(
        usage["completion_tokens"] == counted,
        f"completion_tokens {usage['completion_tokens']}, but {counted} in chunks",
    )
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    expect(usage["total_tokens"] == total, f"total_tokens {usage['total_tokens']} instead of {total}")
    expect(usage["cached_tokens"] <= usage["prompt_tokens"], f"more cached tokens than prompt tokens: {shorten(usage)}")


def check_timings(terminal: Message) -> None:
    """Checks that all five timings are present and none exceeds the total."""
    timings = terminal.get("timings")
    field_types.check(timings, schemas.TIMINGS, "the terminal's timings")
    assert isinstance(timings, dict)
    for name, value in timings.items():
        if name in schemas.TIMINGS:
            # Each is rounded separately.
            expect(value <= timings["total_ms"] + 1, f"{name} {value} exceeds total_ms {timings['total_ms']}")


def check_attempts(messages: Sequence[Message]) -> None:
    """Checks that workers' messages have an attempt of at least 1, and that it never decreases."""
    highest = 0
    for number, message in enumerate(messages, 1):
        attempt = message["attempt"]
        expect(attempt >= highest, f"message {number} has attempt {attempt} after {highest}")
        expect(attempt >= 1 or message.get("worker_id") is None, f"message {number} of a worker has attempt {attempt}")
        expect(attempt >= 1 or not message["tokens"], f"message {number} has tokens in attempt {attempt}")
        highest = attempt


def check_ids(messages: Sequence[Message], request_id: str) -> None:
    for number, message in enumerate(messages, 1):
        seen = message.get("id")
        expect(seen == request_id, f"message {number} has id {shorten(seen)} instead of {request_id!r}")


def check_token_ids(messages: Sequence[Message]) -> None:
    """Checks that each message has exactly `tokens` ids."""
    for number, message in enumerate(messages, 1):
        ids = message.get("token_ids") or []
        expect(field_types.list_of(field_types.COUNT).holds(ids), f"message {number} has token_ids {shorten(ids)}")
        expect(len(ids) == message["tokens"], f"message {number}: {len(ids)} token_ids for {message['tokens']} tokens")


def check_refusal(messages: Sequence[Message], *codes: str, param: str | None = None) -> Message:
    """Checks for a lone error terminal with zero offsets and one of these codes; returns its error. A router's empty
    chunks may precede it.

    `param` is the field at fault; the error's own param may name a part of it."""
    messages = _without_router_s(messages) or messages
    expect(len(messages) == 1, f"{len(messages)} messages instead of a refusal: {shorten(messages[0])}")
    (refusal,) = messages
    field_types.check(refusal, schemas.CHUNK, "the refusal")
    error = refusal.get("error")
    expect(refusal["finish_reason"] == "error", f"finish_reason {refusal['finish_reason']} instead of error")
    check_error(error)
    assert isinstance(error, dict)
    seen = error["code"]
    expect(seen in codes, f"{seen} ({shorten(error['message'])}) instead of {' or '.join(codes)}")
    numbers = [refusal[name] for name in ("offset", "tokens", "text_offset", "text")]
    expect(numbers == [0, 0, 0, ""], f"a refusal with offset, tokens, text_offset, text {numbers}")
    if param is not None:
        check_param(error, param)
    return error


def check_param(error: Message, param: str) -> None:
    seen = error.get("param")
    is_below = isinstance(seen, str) and seen.startswith((f"{param}[", f"{param}."))
    expect(seen == param or is_below, f"param is {seen!r} instead of {param!r}")


def check_alone(messages: Sequence[Message]) -> None:
    """Checks the single message of a request with stream: false."""
    expect(len(messages) == 1, f"{len(messages)} messages instead of a lone terminal")
    terminal = messages[0]
    seen = (terminal.get("offset"), terminal.get("text_offset"))
    expect(seen == (0, 0), f"offset, text_offset {seen} in a terminal that holds the whole answer")
    check_usage(messages)
