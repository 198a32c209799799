"""docs/settings.md is what the flags of the servers say."""

import pytest

from tokenbus.cli.console import catalog, config
from tools import settings_page

PAGE = settings_page.TARGET.read_text()


def test_the_page_is_up_to_date() -> None:
    made = settings_page.render((settings_page.FOLDER / "settings.in.md").read_text())
    assert made == PAGE, "run python -m tools.settings_page"


@pytest.mark.parametrize("section", config.SECTIONS)
def test_every_setting_of_a_server_is_on_the_page_with_its_names_and_its_variable(section: str) -> None:
    for flag in catalog.make_parser(section).flags.values():
        (row,) = [
            line
            for line in PAGE.splitlines()
            if line.startswith(f"| `{flag.option}`")
            and (f"TOKENBUS_{section.upper()}_" in line or "TOKENBUS_*_" in line or flag.name == "config")
        ]
        assert all(f"`{alias}`" in row for alias in flag.aliases)
        assert len(row.split(" | ")[-1]) > 10
