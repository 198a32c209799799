"""Says in plain sentences how a request went, and where its time went. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from tokenbus.protocol.wire import messages
from tokenbus.protocol.wire.traces import first_token_ms

_NOTEWORTHY_MS = 1.0
"""Waits below this are not worth a sentence."""
_MISJUDGED, _MISJUDGED_MS = 2.0, 1_000.0
"""A wait at a worker was misjudged if it was this many times as long as expected, and this long."""


class TraceSpan(NamedTuple):
    """A stretch of a request's time, in ms since its receipt."""

    kind: str
    """`tokenize`, `held`, `queue`, `waiting` (as long as there is no worker), `accept`, `worker_queue`, `prefill`,
    `starting` (as long as it isn't known which of these two it is), `decode`, `refused` or `gap`."""
    where: str
    """The worker; empty for a router."""
    begin_ms: float
    end_ms: float


def spans(trace: messages.RequestTrace) -> list[TraceSpan]:
    """Returns where a request's time went, in order."""
    found = list(_spans_in_router(trace))
    first_ms = first_token_ms(trace)
    accepted = [one for one in trace.attempts if one.accepted_ms is not None]
    for number, attempt in enumerate(trace.attempts):
        end_ms = _end_of(attempt, trace.total_ms)
        following = trace.attempts[number + 1].begun_ms if number + 1 < len(trace.attempts) else None
        if attempt.accepted_ms is None:
            stop_ms = following if following is not None else trace.total_ms
            found.append(
                TraceSpan("refused" if attempt.refused else "accept", attempt.worker_id, attempt.begun_ms, stop_ms)
            )
            continue
        found.append(TraceSpan("accept", attempt.worker_id, attempt.begun_ms, attempt.accepted_ms))
        began_ms = attempt.accepted_ms
        if attempt is accepted[0] and trace.worker_queue_ms is not None and first_ms is not None:
            started_ms = min(end_ms, began_ms + trace.worker_queue_ms)
            found.append(TraceSpan("worker_queue", attempt.worker_id, began_ms, started_ms))
            found.append(TraceSpan("prefill", attempt.worker_id, started_ms, min(end_ms, first_ms)))
            began_ms = min(end_ms, first_ms)
        if attempt.continued_ms is not None:
            again_ms = min(end_ms, attempt.continued_ms)
            found.append(TraceSpan("prefill", attempt.worker_id, began_ms, again_ms))
            began_ms = again_ms
        kind = "decode" if trace.completion_tokens or attempt.tokens else "starting"
        found.append(TraceSpan(kind, attempt.worker_id, began_ms, end_ms))
        if following is not None and attempt.left_ms is not None:
            found.append(TraceSpan("gap", "", end_ms, following))
    return [one for one in found if one.end_ms > one.begin_ms]


def _end_of(attempt: messages.TraceAttempt, total_ms: float) -> float:
    """Returns when a request's time at a worker ended: with the last that was heard of it, if it is lost."""
    if attempt.left_ms is None:
        return total_ms
    heard_ms = attempt.left_ms if attempt.heard_ms is None else attempt.heard_ms
    return min(attempt.left_ms, max(heard_ms, attempt.accepted_ms or 0.0))


def _spans_in_router(trace: messages.RequestTrace) -> Iterator[TraceSpan]:
    end_ms = trace.attempts[0].begun_ms if trace.attempts else trace.total_ms
    at_ms = 0.0
    for kind, ms in (("held", trace.held_ms), ("tokenize", trace.tokenize_ms), ("queue", trace.queue_ms)):
        until_ms = min(end_ms, at_ms + ms)  # what comes after the first worker is in its own gap
        yield TraceSpan(kind, "", at_ms, until_ms)
        at_ms = until_ms
    if trace.state == "waiting" and not trace.attempts:
        yield TraceSpan("waiting", "", at_ms, end_ms)


def story(trace: messages.RequestTrace, router_id: str) -> list[str]:
    """Returns sentences about a request: where it went and why, what was cached, and what it waited for."""
    return [*_of_router(trace, router_id), *_of_workers(trace), *_of_tokens(trace), *_of_end(trace)]


def _of_router(trace: messages.RequestTrace, router_id: str) -> Iterator[str]:
    if trace.adopted:
        yield f"Router {router_id} took the request over from another router; what happened there is not known."
    waits = []
    if trace.held_ms >= _NOTEWORTHY_MS:
        waits.append(f"{_time(trace.held_ms)} for a worker that has {trace.model} loaded")
    if trace.tokenize_ms >= _NOTEWORTHY_MS:
        waits.append(f"{_time(trace.tokenize_ms)} until its prompt was tokenized")
    if trace.queue_ms >= _NOTEWORTHY_MS:
        waits.append(f"{_time(trace.queue_ms)} until a worker had a place and memory for it")
    if waits:
        yield f"In router {router_id} it waited {_listed(waits)}."
    elif not trace.adopted:
        yield f"Router {router_id} received it and did not have to wait for anything."
    if not trace.attempts:
        if trace.state == "waiting":
            yield "No worker has been chosen yet: none has a place and memory for it, or its model is being loaded."
        else:
            yield "It was never sent to a worker."


def _of_workers(trace: messages.RequestTrace) -> Iterator[str]:
    before: messages.TraceAttempt | None = None
    for attempt in trace.attempts:
        yield from _of_choice(trace, attempt, before)
        if attempt.refused:
            yield f"{attempt.worker_id} refused it ({attempt.refused})."
        elif attempt.accepted_ms is None:
            yield f"{attempt.worker_id} has not accepted it."
        if attempt.left_ms is not None:
            if attempt.left == "lost":
                heard, lost = _time(_end_of(attempt, trace.total_ms)), _time(attempt.left_ms)
                yield f"{attempt.worker_id} was last heard of after {heard}, and counted as lost after {lost}."
            else:
                yield f"After {_time(attempt.left_ms)}, {attempt.worker_id} was leaving and gave it up."
        before = attempt


def _of_choice(
    trace: messages.RequestTrace, attempt: messages.TraceAttempt, before: messages.TraceAttempt | None
) -> Iterator[str]:
    name = attempt.worker_id
    if before is not None and before.left_ms is not None:
        pause = ""
        # a router of 0.2.0 does not tell when the next token came
        again_ms = attempt.accepted_ms if attempt.continued_ms is None else attempt.continued_ms
        if again_ms is not None:
            pause = f" after a pause of {_time(again_ms - _end_of(before, trace.total_ms))}"
        yield f"It continued at {name}{pause}, with the {attempt.tokens:,} tokens that the client had."
    if not attempt.policy:
        return
    if not attempt.candidates:
        yield f"It was sent to {name}, which had a request of this id already."
        return
    among = "the only worker that could take it" if attempt.candidates == 1 else f"among {attempt.candidates:,} workers"
    yield f"{name} was chosen by the policy {attempt.policy}, {among}: {_listed(list(_reasons(trace, attempt)))}."
    if attempt.fetch_from and attempt.has_leg:
        yield f"{attempt.fetch_from} was to compute the prompt for it."
    elif attempt.fetch_from:
        yield f"It was to fetch {attempt.fetch_tokens:,} tokens' keys and values from {attempt.fetch_from}."


def _reasons(trace: messages.RequestTrace, attempt: messages.TraceAttempt) -> Iterator[str]:
    if attempt.held_tokens:
        most = (
            " (no other held more)"
            if attempt.candidates > 1 and attempt.held_tokens >= attempt.most_held_tokens
            else ""
        )
        whole = f"the prompt's {trace.prompt_tokens:,} tokens"
        if attempt.tokens:
            whole = f"the {trace.prompt_tokens + attempt.tokens:,} tokens of prompt and answer"
        yield f"it held {attempt.held_tokens:,} of {whole}{most}"
    else:
        is_like_others = attempt.candidates > 1 and not attempt.most_held_tokens
        yield "no worker held any of the prompt" if is_like_others else "it held nothing of the prompt"
    if attempt.most_held_tokens > attempt.held_tokens:
        yield f"another held {attempt.most_held_tokens:,} tokens but would have cost more time"
    if attempt.wait_ms >= _NOTEWORTHY_MS:
        yield f"{attempt.worker_id} was expected to begin after {_time(attempt.wait_ms)}"
    else:
        yield f"{attempt.worker_id} was free"


def _of_tokens(trace: messages.RequestTrace) -> Iterator[str]:
    if trace.worker_queue_ms is not None and trace.prefill_ms is not None:
        cached = f"{trace.cached_tokens:,} of its {trace.prompt_tokens:,} prompt tokens were cached"
        if not trace.cached_tokens:
            cached = f"None of its {trace.prompt_tokens:,} prompt tokens was cached"
        elif trace.fetched_tokens:
            cached += f", {trace.fetched_tokens:,} of them fetched from another worker in {_time(trace.fetch_ms)}"
        yield f"{cached}; computing the others took {_time(trace.prefill_ms)}."
        wait = f"it waited {_time(trace.worker_queue_ms)} at the worker for its turn, a place or memory"
        expected_ms = next((one.wait_ms for one in trace.attempts if one.accepted_ms is not None), 0.0)
        if trace.worker_queue_ms > max(_MISJUDGED_MS, _MISJUDGED * expected_ms):
            wait += ", longer than was expected"
        if trace.worker_queue_ms < _NOTEWORTHY_MS:
            wait = "it did not wait at the worker"
        first_ms, of_what = first_token_ms(trace), "the request"
        if first_ms is None:
            first_ms, of_what = trace.worker_queue_ms + trace.prefill_ms, "its first worker had accepted it"
        yield f"The first token came {_time(first_ms)} after {of_what}; {wait}."
    if any(trace.gaps):
        typical, most = _gap_at(trace.gaps, 0.5), _gap_at(trace.gaps, 1.0)
        workers = [one.worker_id for one in trace.attempts if one.accepted_ms is not None]
        where = f" at {workers[-1]}" if len(workers) > 1 else ""
        yield f"Half of the times between tokens{where} were {typical}, the longest {most}."


def _of_end(trace: messages.RequestTrace) -> Iterator[str]:
    tokens = f"{trace.completion_tokens:,} token{'' if trace.completion_tokens == 1 else 's'}"
    total = _time(trace.total_ms)
    if trace.state in ("waiting", "running"):
        yield f"It has been {trace.state} for {total}, with {tokens}."
    elif trace.code:
        yield f"It ended in the error {trace.code} after {total} and {tokens}."
    else:
        yield f"It ended after {total} with {tokens} ({trace.state})."


def _gap_at(gaps: list[int], share: float) -> str:
    """Returns the bucket in which this share of the times between tokens is reached."""
    wanted, so_far = share * sum(gaps), 0
    for number, count in enumerate(gaps):
        so_far += count
        if so_far >= wanted and count:
            low, high = 2 ** (number - 1), 2**number
            if number == len(gaps) - 1:
                return f"at least {low:,} ms"
            return f"{low:,} to {high:,} ms" if number else "below 1 ms"
    return "unknown"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _time(ms: float) -> str:
    if ms >= 10_000:
        return f"{ms / 1e3:,.0f} s"
    if ms >= 1_000:
        return f"{ms / 1e3:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
