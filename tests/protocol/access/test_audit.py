"""Records of the audit log have a bounded size, go to the subject of their tenant, and name who acts."""

import pytest

from tokenbus.cli.commands.audit import line
from tokenbus.protocol.access import audit
from tokenbus.protocol.access.audit import AuditRecord


def test_a_record_is_read_as_it_was_written_without_what_says_nothing() -> None:
    one = audit.record(
        1.5, "request", "generate", "acme", "k1", model="chat", code=None, adapters=(), ok=False, tokens=0
    )
    assert audit.decode(audit.encode(one)) == one
    assert one == AuditRecord(
        at=1.5,
        kind="request",
        what="generate",
        tenant="acme",
        actor="k1",
        fields={"model": "chat", "ok": False, "tokens": 0},
    )


def test_no_value_makes_a_record_long() -> None:
    one = audit.record(0.0, "control", "x" * 10_000, "acme", "y" * 10_000, model="z" * 10_000, ids=["w" * 900] * 900)
    assert len(audit.encode(one)) < 20 * audit.MAX_TEXT_CHARS
    assert one.fields["model"].endswith("…")


@pytest.mark.parametrize("payload", [b"", b"[]", b'{"at": 1, "kind": "deed", "what": "x"}', b"\xff"])
def test_what_is_no_record_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError):
        audit.decode(payload)


def test_a_record_lies_under_its_tenant_and_kind() -> None:
    assert audit.key_of(audit.record(0.0, "key", "create", "acme.eu")) == "acme=2Eeu.key"
    assert audit.key_of(audit.record(0.0, "control", "drain")) == "=.control"
    assert audit.pattern_of("acme.eu", "key") == "acme=2Eeu.key"
    assert audit.pattern_of() == "*.*"


@pytest.mark.parametrize(
    ("reply", "actor"),
    [
        ("_INBOX_operator.abc.1", ("", "_INBOX_operator")),
        ("_INBOX_key.acme=2Eeu.wh4nrjtmuh.x.1", ("acme.eu", "wh4nrjtmuh")),
        ("_INBOX_key.acme", ("", "_INBOX_key")),
        ("_INBOX_key.=.k.x", ("", "_INBOX_key")),
        ("", ("", "")),
    ],
)
def test_an_operator_is_named_by_the_inbox_that_permissions_bind(reply: str, actor: tuple[str, str]) -> None:
    assert audit.actor_of_inbox(reply) == actor


def test_a_line_shows_who_did_what_moves_no_cursor_and_no_value_looks_like_two() -> None:
    one = audit.record(0.0, "request", "generate", "a\x1b[2J", "", model="m\n", ids=["w-1", "w-2"], code="x ok=True")
    told = r'1970-01-01 00:00:00Z request a\x1b[2J - generate model=m\n ids=w-1,w-2 code="x ok=True"'
    assert line(one) == told
