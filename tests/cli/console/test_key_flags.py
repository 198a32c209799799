"""Servers and commands name the store of keys in the same way."""

from pathlib import Path

import pytest

from tokenbus.cli import main
from tokenbus.cli.commands import gateway, router
from tokenbus.cli.console.flags import UsageError
from tokenbus.protocol.access.key_source import KeySettings


def test_without_the_flag_there_are_no_keys() -> None:
    for command, module in (("router", router), ("gateway", gateway)):
        found = module.settings_of(main.parse([command])).key_settings
        assert found == KeySettings("", 300.0)
        assert not found.are_used


@pytest.mark.parametrize(("given", "found"), [("Bucket", "bucket"), ("./bucket", "./bucket"), ("k.json", "k.json")])
def test_keys_are_in_the_bucket_or_in_a_file(given: str, found: str) -> None:
    assert main.parse(["gateway", "--keys", given]).keys == found


def test_a_misspelled_bucket_is_no_file() -> None:
    with pytest.raises(UsageError, match=r"^--keys must be bucket or a JSON file .*, got 'buckt'$"):
        main.parse(["router", "--keys", "buckt"])


def test_one_variable_or_a_file_sets_it_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tokenbus.toml"
    file.write_text('[gateway]\nkeys = "bucket"\nkeys-stale-s = 0\n')
    options = main.parse(["gateway", "--config", str(file)])
    assert gateway.settings_of(options).key_settings == KeySettings("bucket", 0.0)
    monkeypatch.setenv("TOKENBUS_KEYS", "all.json")
    assert main.parse(["router"]).keys == "all.json"
