"""`make test-upgrade OLD=REF`: holds the version of a Git ref and this one against each other, side by side.

Both are built and installed as wheels. A system of the old version is upgraded under streams whose every token is
checked, and rolled back through every mixture of workers, routers and gateways of both. In each one, `wire-check` of
both versions runs. Then both read what the other has stored in a broker: keys, usage, audit log, responses."""

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
from pathlib import Path

import structlog

from tests.upgrade import mixtures, stored, versions
from tests.upgrade.mixtures import Step


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-upgrade", description=__doc__)
    parser.add_argument("old", metavar="OLD", help="tag, branch or commit, such as HEAD~50")
    ref = parser.parse_args().old
    print(f"building {ref} and this version", flush=True)
    old, new = versions.of(ref), versions.this()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(prefix="tokenbus-upgrade-") as name:
        found = asyncio.run(_compare(old, new, Path(name)))
        if found:
            shutil.copytree(name, versions.FOLDER / "logs", dirs_exist_ok=True)
            print(f"\n{len(found)} problems; the logs are in {versions.FOLDER / 'logs'}:")
            print("\n".join(f"  {one}" for one in found))
    return 1 if found else 0


async def _compare(old: versions.Version, new: versions.Version, folder: Path) -> list[str]:
    """Prints the results and returns the problems."""
    found: list[str] = []
    steps: list[Step] = []
    print("| workers | routers | gateways | pair | streams | cut | wrong | old rules | new rules |\n|" + "---|" * 9)
    (folder / "mixtures").mkdir()
    async for step in mixtures.roll(old, new, folder / "mixtures"):
        steps.append(step)
        held = (
            f"{sum(one.startswith('ok') for one in rules.values())} of {len(rules)}" for rules in step.rules.values()
        )
        row = (*step.mixture.values(), step.name, str(step.streams), str(step.cut), str(step.wrong), *held)
        print("\n".join([f"| {' | '.join(row)} |", *step.problems]), flush=True)
        found += [f"{step.name or 'all ' + step.mixture['worker']}: {one}" for one in step.problems]
    found += mixtures.newly_broken(steps)
    if not stored.has_keys(old):
        print("stored: the old version has no keys, usage and audit log to read")
        return found
    for config_of in (old, new):
        stages = (old, new, old)
        seen = await stored.problems(config_of, stages, folder / f"stored-{config_of.name}")
        print(f"stored, with the {config_of.name} version's broker: old, new, old: {len(seen)} problems", flush=True)
        found += [f"with the {config_of.name} version's broker: {one}" for one in seen]
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
