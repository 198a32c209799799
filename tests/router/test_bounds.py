"""docs/security.md says of everything that clients may publish what bounds it."""

import re
from pathlib import Path

from tokenbus.protocol.wire.subjects import Subjects

PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text()
NOT_OF_CLIENTS = {"card", "events", "beat", "guard", "discover", "worker", "router", "routers", "listing"}
"""What routers hear from workers and from each other: the broker's permissions keep clients from it."""


def heard_by_routers() -> set[str]:
    """The first token of each subject that the broker's permissions let a router hear, without inboxes."""
    config = (Path(__file__).parents[2] / "deploy/nats.conf").read_text()
    router = config.partition("user: router,")[2].partition("publish:")[0]
    return set(re.findall(rf'"{re.escape(Subjects().prefix)}\.(\w+)', router))


def test_every_subject_of_clients_has_its_bound_on_the_page() -> None:
    table = PAGE.partition("what bounds it |\n")[2].partition("\n\n")[0]
    told = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert told == heard_by_routers() - NOT_OF_CLIENTS
