"""`tokenbus keys` makes keys whose secret is shown once, and says what is wrong with what it is asked."""

import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tokenbus.cli import main
from tokenbus.cli.console import key_table
from tokenbus.cli.console.flags import UsageError
from tokenbus.protocol import late_logger
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.keys import KeyRecord


class Commands:
    """Runs `tokenbus keys` on one file."""

    def __init__(self, file: Path, captured: pytest.CaptureFixture[str]) -> None:
        self.file = file
        self._captured = captured
        self.said = ""
        """What the last command has said on standard error."""

    def __call__(self, *arguments: str, status: int = 0) -> str:
        """Returns the standard output of one command."""
        options = main.parse(["keys", *arguments, "--keys", str(self.file)])
        assert options.run(options) == status
        output, self.said = self._captured.readouterr()
        return output


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Commands]:
    yield Commands(tmp_path / "keys.json", capsys)
    structlog.reset_defaults()  # the command has configured this process's log
    late_logger.configure_first(None)


def shown(run: Commands, key: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(run("show", str(keys.id_of(key)), "--json"))
    return found


def test_a_new_key_is_all_that_a_script_reads(run: Commands, tmp_path: Path) -> None:
    key = run("create", "--tenant", "acme", "--name", "app").removesuffix("\n")
    assert keys.id_of(key) is not None
    assert "acme" in run.said
    assert key not in run.said
    stored = (tmp_path / "keys.json").read_text()
    assert key[14:] not in stored
    assert os.stat(tmp_path / "keys.json").st_mode & 0o777 == 0o600


def test_a_key_has_what_its_flags_say_and_no_list_shows_its_digest(run: Commands) -> None:
    limits = {
        "requests_per_minute": 600,
        "tokens_per_minute": 0,
        "tokens_per_day": 9,
        "concurrency": 8,
        "max_tokens": 7,
        "connections": 3,
    }
    limited = [f"--{name.replace('_', '-')}={number}" for name, number in limits.items()]
    times = ["--expires", "2090-01-01", "--not-before", "2089-12-31"]
    made = ["--models", "chat-*", "--models", "base:style", "--role", "Viewer", "--max-priority", "-5"]
    key = json.loads(run("create", "--json", *limited, *times, *made))
    assert key["key"].startswith(f"tb_{key['id']}_")
    found = shown(run, key["key"])
    assert found == {name: value for name, value in key.items() if name != "key"}
    assert (found["models"], found["role"], found["max_priority"]) == (["chat-*", "base:style"], "viewer", -5)
    assert found["limits"] == limits
    assert (found["expires_at"], found["state"]) == (3_786_912_000.0, "not yet valid")
    for text in (run("list"), run("show", key["id"]), run("list", "--json")):
        assert not re.search(r"[0-9a-f]{32}", text)
        assert key["id"] in text


def test_a_list_is_of_all_tenants_or_of_one(run: Commands) -> None:
    assert (run("create", "--tenant", "b"), run("create", "--tenant", "a")) != ("", "")
    lines = run("list").splitlines()
    assert lines[0].split() == ["id", "tenant", "name", "role", "models", "limits", "expires", "state"]
    assert [line.split()[1] for line in lines[1:]] == ["a", "b"]
    assert [one["tenant"] for one in json.loads(run("list", "--tenant", "b", "--json"))] == ["b"]
    assert run("list", "--tenant", "c") == ""
    assert "there are no keys of the tenant c" in run.said


def test_a_key_is_revoked_once_and_a_rotation_does_not_bring_it_back(run: Commands) -> None:
    key = run("create").strip()
    beginning = str(keys.id_of(key))[:7]
    assert run("revoke", beginning, "--yes") == ""
    first = shown(run, key)["revoked_at"]
    run("revoke", beginning, "--yes")
    assert "already" in run.said
    assert shown(run, key)["revoked_at"] == first
    options = main.parse(["keys", "rotate", beginning, "--keys", str(run.file)])
    with pytest.raises(ValueError, match="has been revoked"):
        options.run(options)


def test_a_change_leaves_what_it_does_not_name_and_says_what_is_other_now(run: Commands) -> None:
    limits = ["--max-tokens", "5", "--requests-per-minute", "60"]
    key = run("create", "--models", "a", "--name", "app", "--expires", "2090-01-01", *limits).strip()
    before = shown(run, key)
    after = json.loads(run("change", str(keys.id_of(key)), "--max-tokens", "0", "--role", "viewer", "--json"))
    assert "has changed in role, max_tokens" in run.said
    kept = {name: value for name, value in before.items() if name not in ("limits", "role")}
    assert {name: after[name] for name in kept} == kept
    assert (after["role"], after["limits"]["max_tokens"], after["limits"]["requests_per_minute"]) == ("viewer", 0, 60)
    assert shown(run, key) == after
    run("change", str(keys.id_of(key)), "--expires", "never", "--models", "*")
    assert (shown(run, key)["expires_at"], shown(run, key)["models"]) == (None, ["*"])
    run("change", str(keys.id_of(key)), "--models", "*")
    assert "has all of this already" in run.said


def test_a_person_is_asked_before_a_key_is_revoked(run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    key = run("create", "--name", "precious").strip()
    with pytest.raises(ValueError, match="revoke needs --yes"):
        run("revoke", str(keys.id_of(key)))

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for typed, status, state in (("", 1, "valid"), ("n\n", 1, "valid"), ("y\n", 0, "revoked")):
        monkeypatch.setattr("sys.stdin", Terminal(typed))
        assert run("revoke", str(keys.id_of(key)), status=status) == ""
        assert status or "precious" in run.said
        assert shown(run, key)["state"] == state


def test_a_rotation_shows_the_new_secret_alone_and_says_how_long_the_old_one_lasts(run: Commands) -> None:
    key = run("create").strip()
    again = run("rotate", str(keys.id_of(key)), "--grace", "1h").strip()
    assert (keys.id_of(again), again == key) == (keys.id_of(key), False)
    assert "valid until" in run.said
    assert shown(run, key)["old_secret_valid_until"] is not None
    run("rotate", str(keys.id_of(key)))
    assert "not valid any more" in run.said


def test_the_beginning_of_several_ids_is_refused_with_these(run: Commands) -> None:
    for _ in range(40):
        run("create")
    ids = [one["id"] for one in json.loads(run("list", "--json"))]
    first = next(char for char in "abcdefghijklmnopqrstuvwxyz" if sum(one.startswith(char) for one in ids) > 1)
    run("show", first, status=1)
    assert re.search(rf"'{first}' begins \d+ ids: {first}", run.said)
    run("show", "1", status=1)
    assert "no key whose id begins with '1'" in run.said
    run("show", "aaaaaaaaaa", status=1)
    assert "there is no key aaaaaaaaaa" in run.said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["create", "--requests-per-minute", "-1"], "--requests-per-minute must be 0 or more, got -1"),
        (["create", "--tokens-per-day", "NaN"], "--tokens-per-day must be a whole number, got 'NaN'"),
        (["create", "--tokens-per-day", str(2**63)], r"--tokens-per-day must be at most [\d,]+, got 92233720368547758"),
        (["create", "--role", "root"], "--role must be user, viewer or operator"),
        (["create", "--expires", "soon"], "--expires must be a date such as 2027-01-31 or a duration such as 30d"),
        (["create", "--expires", "2020-01-01"], "--expires must be in the future, got 2020-01-01"),
        (["create", "--expires", "1d", "--not-before", "2d"], "--expires must be later than --not-before"),
        (["create", "--models", ""], "--models must be a pattern of 1 to 128 bytes"),
        (["create", "--tenant", "x" * 200], "--tenant must be a name of 1 to 128 bytes"),
        (["create", "--tenant", "a b>"], r"--tenant must be a name of 1 to 128 bytes without spaces, \* and >"),
        (["create", "--models", "chat-["], r"--models must be a pattern .* such as chat-\* or chat-\[ab\]"),
        (["change", "abc"], "change takes at least one option of what is to change"),
        (["change", "abc", "--tenant", "b"], "not of change: a key's tenant never changes"),
        (["change", "abc", "--expires", "2020-01-01"], "--expires must be in the future, got 2020-01-01"),
        (["change", "--name", "x"], "change takes the id of a key, got none"),
        (["rotate", "abc", "--max-tokens", "1"], "--max-tokens is an option of `tokenbus keys create`, not of rotate"),
        (["create", "--name", "\x1b[2J"], "--name must be at most 200 printable characters"),
        (["create", "abc"], "create takes no further arguments, got abc"),
        (["list", "--grace", "1d"], "--grace is an option of `tokenbus keys rotate`, not of list"),
        (["show"], "show takes the id of a key, got none"),
        (["rotate", "abc", "def"], "rotate takes the id of a key, got abc def"),
        (["remove"], "must be create, list, show, change, revoke or rotate, got remove"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(run: Commands, arguments: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        run(*arguments)


def test_a_whole_key_is_no_argument(run: Commands) -> None:
    key = run("create").strip()
    with pytest.raises(UsageError, match="which others can read in the list of processes") as raised:
        run("revoke", "--yes", key)
    assert key not in str(raised.value)


def test_what_others_can_read_or_nothing_has_written_is_refused(run: Commands, tmp_path: Path) -> None:
    run("list", status=1)
    assert "No such file" in run.said
    run("create")
    os.chmod(tmp_path / "keys.json", 0o644)
    run("list", status=1)
    assert "chmod 600" in run.said


def test_a_name_in_a_table_moves_no_cursor_and_columns_are_straight() -> None:
    new = keys.new_key()
    record = KeyRecord(id=new.id, hash=new.hash, tenant="\x1b[2J日本", name="APP")
    head, line = key_table.table([record], 0.0).splitlines()
    assert "\x1b" not in line
    assert line.index("APP") + 2 == head.index("name"), "two characters are two columns wide"
