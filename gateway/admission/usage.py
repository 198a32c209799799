"""Token counts of requests with several prompts and answers."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from tokenbus.protocol.wire import messages


def usage_of(usages: Sequence[messages.Usage]) -> messages.Usage | None:
    """Returns the combined usage of all answers to one prompt. The prompt counts once, as for the first answer."""
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


def total_usage(by_choice: Mapping[int, messages.Usage], n: int) -> messages.Usage | None:
    """Returns the combined usage of all prompts, each with `n` answers."""
    by_prompt: dict[int, list[messages.Usage]] = {}
    for choice in sorted(by_choice):
        by_prompt.setdefault(choice // n, []).append(by_choice[choice])
    found = [usage for one in by_prompt.values() if (usage := usage_of(one)) is not None]
    if len(found) < 2:
        return found[0] if found else None
    return messages.Usage(
        prompt_tokens=sum(one.prompt_tokens for one in found),
        completion_tokens=sum(one.completion_tokens for one in found),
        total_tokens=sum(one.total_tokens for one in found),
        cached_tokens=sum(one.cached_tokens for one in found),
    )
