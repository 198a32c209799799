"""Rolls one kind of process after another between two versions, under streams, through all mixtures of them."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.chaos.results import Ends, Record
from tests.chaos.round import Setup, broken_promises, new_record, started
from tests.support.system import command, environment
from tests.upgrade.versions import Version

GROUPS = ("worker", "router", "gateway")
STEPS = (
    *(("router", "new"), ("worker", "new"), ("gateway", "new")),  # the order of docs/upgrades.md
    *(("worker", "old"), ("router", "old"), ("worker", "new"), ("gateway", "old"), ("worker", "old")),
)
"""Which group is replaced by which version: an upgrade, and then back through the mixtures that it has left out."""
NUM_STREAMS = 500
"""Streams under each step, at least, with those that run in its mixture afterwards."""
SETUP = Setup(engine="sim", num_workers=3, num_tokens=80, num_gateways=2, num_http=16)
_WIRE_CHECK_S = 300.0
_Rules = Mapping[str, dict[str, str]]
"""The verdict of each rule of the wire contract, by the version whose `wire-check` it is."""


class Step(NamedTuple):
    """The result of one step."""

    mixture: Mapping[str, str]
    """The version of each group after the step."""
    streams: int
    cut: int
    """Streams that ended in an error, or did not end."""
    wrong: int
    """Streams with a text that an undisturbed one does not have, with a hole, or with anything after their end."""
    problems: list[str]
    rules: _Rules

    @property
    def name(self) -> str:
        """Returns which group has another version than the other two; empty if all have the same."""
        counts = Counter(self.mixture.values())
        alone = [group for group in GROUPS if counts[self.mixture[group]] == 1]
        return f"{self.mixture[alone[0]]} {alone[0]}s" if alone and len(counts) > 1 else ""


async def roll(old: Version, new: Version, folder: Path) -> AsyncIterator[Step]:
    """Yields the result of each step. The first is that of the old version alone, where nothing is replaced."""
    versions = {"old": old, "new": new}
    mixture = dict.fromkeys(GROUPS, "old")
    before: _Rules = {}
    async with started(SETUP, folder, dict.fromkeys(GROUPS, old.python)) as site:
        for number, (group, name) in enumerate(((None, "old"), *STEPS)):
            record = new_record("roll", number, SETUP.engine)
            try:
                async with asyncio.timeout(400), site.under_load(record) as streams:
                    if group is not None:
                        mixture[group] = name
                        await site.fleet.change_version(group, versions[name].python)
                        await streams.until_ended(NUM_STREAMS)
            except Exception as error:  # whatever went wrong is also a result
                record.failure = f"{type(error).__name__}: {error}"
            verdicts = await asyncio.gather(*(wire_check(one, site.url) for one in (old, new)))
            rules = dict(zip(versions, verdicts, strict=True))
            before = before or rules
            for version, rule in _broken_since(before, rules):  # some depend on times, and the machine may be busy
                rules[version] |= await wire_check(versions[version], site.url, rule)
            yield _step(dict(mixture), record, rules)
            if record.failure:
                return


def _step(mixture: Mapping[str, str], record: Record, rules: _Rules) -> Step:
    ends = sum(record.ends.values(), Ends())
    cut = ends.lost + ends.unanswered + sum(ends.errors.values())
    return Step(mixture, ends.streams, cut, ends.wrong + ends.holes, broken_promises(record) + record.notes, rules)


async def wire_check(version: Version, url: str, only: str = "") -> dict[str, str]:
    """Returns the verdicts of a version's `wire-check` on the running system, by rule, of those that contain a text.
    Raises ChildProcessError."""
    process = await asyncio.create_subprocess_exec(
        *command("wire-check", "--nats", url, "--json", "--only", only, python=version.python),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(version.python),
    )
    try:
        async with asyncio.timeout(_WIRE_CHECK_S):
            printed, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    found = [json.loads(line) for line in printed.splitlines() if line.startswith(b"{")]
    if not found:
        raise ChildProcessError(f"wire-check of the {version.name} version: {said.decode()[-400:]}")
    return {one["rule"]: " ".join(filter(None, (one["verdict"], one["reason"]))) for one in found}


def newly_broken(steps: Sequence[Step]) -> list[str]:
    """Returns the rules that hold for the old version alone, and are broken in a mixture or for the new one."""
    first, *later = steps
    return [
        f"{version}'s rule: {rule}: {step.rules[version][rule]} ({_described(step)})"
        for step in later
        for version, rule in _broken_since(first.rules, step.rules)
    ]


def _broken_since(before: _Rules, now: _Rules) -> list[tuple[str, str]]:
    """Returns the rules that are broken now and held before, each with the version whose rule it is."""
    return [
        (version, rule)
        for version, verdicts in now.items()
        for rule, verdict in verdicts.items()
        if verdict.startswith("broken") and before[version].get(rule, "").startswith("ok")
    ]


def _described(step: Step) -> str:
    return ", ".join(f"{version} {group}" for group, version in step.mixture.items())
