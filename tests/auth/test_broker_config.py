"""Who makes a broker's configuration is told where that listens, there and in the configuration."""

from pathlib import Path

import pytest

from tokenbus.cli import main


def test_a_configuration_that_listens_everywhere_says_so_and_how_to_change_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = main.parse(["auth-init", str(tmp_path / "callout.seeds")])
    assert options.run(options) == 0
    said = capsys.readouterr()
    assert "listens on all addresses, without TLS" in said.err
    before, _, _ = said.out.partition("\nport: 4222\n")
    assert before.splitlines()[-1] == (
        "# It listens on all addresses of its machine. For clients of this machine alone, "
        'write `listen: "127.0.0.1:4222"` instead.'
    )
    assert "\n# For TLS, uncomment this line" in said.out
