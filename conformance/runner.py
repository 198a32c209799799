"""Runs the rules: some alone, others a few at a time, each with its own client and time limit."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import nats.errors

from tokenbus.conformance.probing.assertions import BrokenError, SkippedError
from tokenbus.conformance.probing.probe import Probe
from tokenbus.conformance.probing.report import Outcome, RuleVerdict
from tokenbus.conformance.rules.registry import Rule
from tokenbus.protocol import tasks

_CONCURRENCY = 6
"""Rules that run concurrently."""


async def run_all(rules: Sequence[Rule], make_probe: Callable[[], Probe], timeout_s: float) -> AsyncIterator[Outcome]:
    """Yields the outcomes in the order of the rules, each as soon as it and all before it are known."""
    exclusive: dict[str, Outcome] = {}
    for rule in rules:
        if rule.exclusive:
            exclusive[rule.name] = await run_one(rule, make_probe(), timeout_s)
    room = asyncio.Semaphore(_CONCURRENCY)

    async def in_turn(rule: Rule) -> Outcome:
        async with room:
            return await run_one(rule, make_probe(), timeout_s)

    running = {rule.name: tasks.awaited(in_turn(rule)) for rule in rules if not rule.exclusive}
    try:
        for rule in rules:
            yield exclusive[rule.name] if rule.exclusive else await running[rule.name]
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def run_one(rule: Rule, probe: Probe, timeout_s: float) -> Outcome:
    """Runs one rule. Never raises: a check that fails in any way counts as a broken rule."""
    began = time.monotonic()
    # Both run concurrently: a rule whose messages the broker denies would end only at its time limit.
    judging = tasks.awaited(_judge(rule, probe, timeout_s))
    refusal = tasks.awaited(probe.link.wait_denied(probe.used_subjects))
    try:
        await asyncio.wait((judging, refusal), return_when=asyncio.FIRST_COMPLETED)
    finally:
        judging.cancel()
        refusal.cancel()
        await asyncio.wait((judging, refusal))
    if denial := probe.link.denied_reason(probe.used_subjects):  # denied subjects can make rules seem to hold
        verdict, reason = RuleVerdict.SKIPPED, f"denied by the broker: {denial}"
    else:
        verdict, reason = judging.result()
    with contextlib.suppress(nats.errors.Error):  # the connection itself may have failed
        await probe.close()
    return Outcome(rule.name, verdict, reason, (time.monotonic() - began) * 1e3)


async def _judge(rule: Rule, probe: Probe, timeout_s: float) -> tuple[RuleVerdict, str]:
    try:
        async with asyncio.timeout(timeout_s):
            await rule.check(probe)
    except BrokenError as error:
        return RuleVerdict.BROKEN, str(error)
    except SkippedError as error:
        return RuleVerdict.SKIPPED, str(error)
    except TimeoutError:
        return RuleVerdict.BROKEN, f"no result within {timeout_s:g} s"
    except Exception as error:  # outermost frame of a rule: malformed messages may make its check raise anything
        return RuleVerdict.BROKEN, f"{type(error).__name__}: {error}"
    return RuleVerdict.OK, ""
