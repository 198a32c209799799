"""People write times as durations from now, or as dates of UTC."""

import time

import pytest

from tokenbus.cli.console import moments


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("45m", 2_700), ("12h", 43_200), ("1.5d", 129_600), ("2W", 1_209_600)]
)
def test_a_duration_has_a_unit(text: str, seconds: float) -> None:
    assert moments.duration_s(text) == seconds
    assert abs(moments.moment(text) - time.time() - seconds) < 60


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2027-01-31", 1_801_353_600.0),
        ("2027-01-31T12:30", 1_801_398_600.0),
        ("2027-01-31 12:30:00+01:00", 1_801_395_000.0),
        ("2027-01-31T12:30Z", 1_801_398_600.0),
    ],
)
def test_a_date_is_one_of_utc_unless_it_says_otherwise(text: str, at: float) -> None:
    assert moments.moment(text) == at


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "nan", "1e3d", "tomorrow", "2027-13-01", "1900-01-01", "1e9w"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        moments.moment(text)


def test_a_moment_is_shown_as_it_may_be_written() -> None:
    assert moments.text_of_moment(1_801_353_600.0) == "2027-01-31"
    assert moments.text_of_moment(1_801_398_600.0) == "2027-01-31 12:30 UTC"
