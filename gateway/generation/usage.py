"""The token counts of requests with several answers; pure."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from tokenbus.protocol.wire import messages


def usage_of(usages: Sequence[messages.Usage]) -> messages.Usage | None:
    """Returns the usage of all answers to one prompt together. The prompt counts once, as the first answer found it."""
    if not usages:
        return None
    first = usages[0]
    generated = sum(one.completion_tokens for one in usages)
    reasoned = [one.reasoning_tokens for one in usages if one.reasoning_tokens is not UNSET]
    return msgspec.structs.replace(
        first,
        completion_tokens=generated,
        total_tokens=first.prompt_tokens + generated,
        reasoning_tokens=sum(reasoned) if reasoned else UNSET,
    )
